// Attention of few queries over graded tokens (stores/graded.py), straight from their packed codes.
//
// Tokens are taken in pieces of one head and one grade. A piece's keys and values are decoded a tile at a time into a
// small buffer; each thread keeps a running softmax for every head, and these are merged by their largest logits.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { LANES = 16, TILE = 16, PIECE = 256, MAX_DIM = 256, MAX_QUERIES = 16, STRIDE = MAX_DIM + LANES };

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// As graded_cpu.py's _Arguments has it. Kinds of floats: 0 float32, 1 float16, 2 bfloat16. Frame tensors begin with
// this row's part; buffers are the row's own.
typedef struct {
    int64_t heads, queries, key_dim, value_dim, grades, widths, threads;
    int64_t visible, position_bytes, turned_stride;
    int64_t frame_kind, scale_kind, exact_kind;
    double softcap;  // 0: none
    const float *query;   // (heads, queries, key_dim), scaled
    const float *turned;  // (heads, queries, turned_stride) or null
    const int64_t *width; // (widths)
    const int32_t *counts;
    const int16_t *key_counts;
    const uint8_t *value_bits, *order;
    const void *key_mean, *key_deviation, *value_mean;
    const float *value_magnitude;
    const void *positions;
    const uint8_t *key_codes, *value_codes, *magnitudes, *fine_keys, *fine_values;
    const void *fine_scales, *exact_keys, *exact_values;
    float *rotated, *plain; // (heads, queries, value_dim)
    float *lse;             // (heads, queries)
} arguments;

typedef struct {
    int64_t head, grade, count;
    int64_t start, done, codes; // first token, as the head's, the grade's and the row's tokens of its kind are ordered
} piece;

static float levels[9][256], pairs[256][2], quads[256][4], magnitude_of[256];
static const int planes[9][4] = {{0}, {1}, {2}, {2, 1}, {4}, {4, 1}, {4, 2}, {4, 2, 1}, {8}};

// Codebooks of 1 to 8 bits, one after the other, and the 256 magnitudes.
void kvfold_graded_tables(const float *codebooks, const float *magnitudes) {
    for (int bits = 1; bits <= 8; codebooks += 1 << bits, bits++)
        memcpy(levels[bits], codebooks, sizeof(float) << bits);
    for (int byte = 0; byte < 256; byte++) {
        for (int k = 0; k < 2; k++) pairs[byte][k] = levels[4][byte >> (4 * k) & 15];
        for (int k = 0; k < 4; k++) quads[byte][k] = levels[2][byte >> (2 * k) & 3];
    }
    memcpy(magnitude_of, magnitudes, sizeof magnitude_of);
}

static int64_t packed_bytes(int64_t n, int64_t bits) {
    int64_t bytes = 0;
    for (const int *plane = planes[bits]; *plane; plane++) bytes += (n * *plane + 7) / 8;
    return bytes;
}

static float bits_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static float number(const void *from, int64_t kind, int64_t index) {
    if (kind == 0) return ((const float *)from)[index];
    uint32_t half = ((const uint16_t *)from)[index];
    if (kind == 2) return bits_float(half << 16);
    uint32_t sign = (half & 0x8000) << 16, rest = half & 0x7fff;
    if (rest >= 0x7c00) return bits_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
    return bits_float(sign | rest << 13) * 0x1p112f; // the exponent's bias, also right for subnormals
}

static void numbers(const void *from, int64_t kind, int64_t start, int64_t count, float *to) {
    if (kind == 2)
        for (int64_t i = 0; i < count; i++) to[i] = bits_float((uint32_t)((const uint16_t *)from)[start + i] << 16);
    else
        for (int64_t i = 0; i < count; i++) to[i] = number(from, kind, start + i);
}

// Writes up to 7 floats more than n.
static void decode(const uint8_t *row, int64_t bits, int64_t n, float *to) {
    if (bits == 8) {
        for (int64_t i = 0; i < n; i++) to[i] = levels[8][row[i]];
    } else if (bits == 4) {
        for (int64_t i = 0; i < (n + 1) / 2; i++) memcpy(to + 2 * i, pairs[row[i]], sizeof *pairs);
    } else if (bits == 2) {
        for (int64_t i = 0; i < (n + 3) / 4; i++) memcpy(to + 4 * i, quads[row[i]], sizeof *quads);
    } else {
        uint8_t codes[MAX_DIM + 8] = {0};
        int low = 0;
        for (const int *plane = planes[bits]; *plane; low += *plane++) {
            int64_t bytes = (n * *plane + 7) / 8;
            for (int k = 0; k < 8 / *plane; k++)
                for (int64_t i = 0; i < bytes; i++)
                    codes[k * bytes + i] |= (uint8_t)((row[i] >> (k * *plane) & ((1 << *plane) - 1)) << low);
            row += bytes;
        }
        for (int64_t i = 0; i < n; i++) to[i] = levels[bits][codes[i]];
    }
}

// exp of x <= 0 to about 1e-7, and 0 far below.
static float exponential(float x) {
    float scaled = (x < -87 ? -87 : x) * 1.44269504f, whole = floorf(scaled + 0.5f);
    float rest = scaled - whole;
    float result = 1.5403530e-4f;
    result = result * rest + 1.3333558e-3f;
    result = result * rest + 9.6181291e-3f;
    result = result * rest + 5.5504109e-2f;
    result = result * rest + 2.4022651e-1f;
    result = result * rest + 6.9314718e-1f;
    result = result * rest + 1;
    return x < -87 ? 0 : result * bits_float((uint32_t)((int32_t)whole + 127) << 23);
}

static float dot(const float *one, const float *other, int64_t count) {
    float sum = 0;
    for (int64_t i = 0; i < count; i++) sum += one[i] * other[i];
    return sum;
}

static int64_t position(const arguments *a, int64_t index) {
    return a->position_bytes == 2 ? ((const int16_t *)a->positions)[index] : ((const int32_t *)a->positions)[index];
}

// A head's queries: as they are, ordered like its codes, and what they make of the mean and of a constant.
typedef struct {
    float plain[MAX_QUERIES][STRIDE], ordered[MAX_QUERIES][STRIDE], mean[MAX_QUERIES], sum[MAX_QUERIES];
    int64_t first; // of the head's tokens in the row
} head_query;

static int64_t padded(int64_t dim) { return (dim + LANES - 1) / LANES * LANES; }

// Adds a piece to its head's running softmax: for each query rotated and plain values (padded), then peak, total, coded
// mass and what fine values have in all channels. The offsets are those of the piece's grade.
static void attend(const arguments *a, const head_query *q, const piece *p, const int64_t *key_offsets,
                   int64_t value_offset, float *state) {
    float tile[TILE * STRIDE] = {0}, weight[MAX_QUERIES][PIECE], factor[PIECE], added[PIECE];
    int64_t n = a->queries, value_pad = padded(a->value_dim), first = q->first + p->start, channels = a->key_dim;
    int coded = p->grade < a->grades, fine = p->grade == a->grades;
    const int16_t *by_width = coded ? a->key_counts + (p->head * a->grades + p->grade) * a->widths : 0;
    if (coded) channels = 0;
    for (int64_t w = 0; coded && w < a->widths; w++) channels += by_width[w];
    for (int64_t start = 0; start < p->count; start += TILE) {
        int64_t size = p->count - start < TILE ? p->count - start : TILE;
        int64_t column = 0;
        for (int64_t w = 0; coded && w < a->widths; column += by_width[w++]) {
            int64_t bytes = packed_bytes(by_width[w], a->width[w]);
            const uint8_t *row = a->key_codes + key_offsets[w] + (p->done + start) * bytes;
            for (int64_t t = 0; t < size; t++)
                decode(row + t * bytes, a->width[w], by_width[w], tile + t * STRIDE + column);
        }
        for (int64_t t = 0; !coded && t < size; t++) {
            int64_t from = (p->codes + start + t) * a->key_dim;
            if (fine)
                for (int64_t i = 0; i < a->key_dim; i++) tile[t * STRIDE + i] = a->fine_keys[from + i];
            else
                numbers(a->exact_keys, a->exact_kind, from, a->key_dim, tile + t * STRIDE);
        }
        for (int64_t t = 0; t < size; t++) {
            memset(tile + t * STRIDE + channels, 0, LANES * sizeof *tile);
            for (int64_t j = 0; j < n; j++)
                weight[j][start + t] = dot(coded ? q->ordered[j] : q->plain[j], tile + t * STRIDE, padded(channels));
        }
    }
    int64_t seen = 0;
    for (int64_t t = 0; t < p->count; t++) seen += position(a, first + t) < a->visible;
    if (!seen) return;
    for (int64_t t = 0; t < p->count; t++) {
        factor[t] = fine ? number(a->fine_scales, a->scale_kind, 4 * (p->codes + t)) : 1;
        added[t] = fine ? number(a->fine_scales, a->scale_kind, 4 * (p->codes + t) + 1) : 0;
    }
    for (int64_t j = 0; j < n; j++) {
        float *own = weight[j], *one = state + j * (2 * value_pad + 4), *sums = one + 2 * value_pad;
        const float *turned = a->turned ? a->turned + (p->head * n + j) * a->turned_stride : 0;
        for (int64_t t = 0; coded && t < p->count; t++)
            own[t] += q->mean[j] + (turned ? turned[position(a, first + t)] : 0);
        for (int64_t t = 0; fine && t < p->count; t++) own[t] = own[t] * factor[t] + q->sum[j] * added[t];
        for (int64_t t = 0; a->softcap > 0 && t < p->count; t++)
            own[t] = tanhf(own[t] / (float)a->softcap) * (float)a->softcap;
        for (int64_t t = 0; seen < p->count && t < p->count; t++)
            if (position(a, first + t) >= a->visible) own[t] = -INFINITY;
        float peak = sums[0], total = 0;
        for (int64_t t = 0; t < p->count; t++) peak = own[t] > peak ? own[t] : peak;
        float shrink = exponential(sums[0] - peak);
        for (int64_t i = 0; shrink != 1 && i < 2 * value_pad + 4; i++) one[i] *= shrink;
        for (int64_t t = 0; t < p->count; t++) total += own[t] = exponential(own[t] - peak);
        sums[0] = peak;
        sums[1] += total;
        if (coded) sums[2] += total;
    }
    int64_t bits = coded ? a->value_bits[p->head * a->grades + p->grade] : 8;
    if (!bits) return;
    for (int64_t t = 0; t < p->count; t++) {
        if (coded) factor[t] = magnitude_of[a->magnitudes[p->codes + t]];
        if (fine) factor[t] = number(a->fine_scales, a->scale_kind, 4 * (p->codes + t) + 2);
        if (fine) added[t] = number(a->fine_scales, a->scale_kind, 4 * (p->codes + t) + 3);
    }
    for (int64_t j = 0; j < n; j++) {
        if (fine) state[j * (2 * value_pad + 4) + 2 * value_pad + 3] += dot(weight[j], added, p->count);
        for (int64_t t = 0; t < p->count; t++) weight[j][t] *= factor[t];
    }
    int64_t bytes = packed_bytes(a->value_dim, bits);
    for (int64_t start = 0; start < p->count; start += TILE) {
        int64_t size = p->count - start < TILE ? p->count - start : TILE;
        for (int64_t t = 0; t < size; t++) {
            int64_t from = (p->codes + start + t) * a->value_dim;
            float *to = tile + t * STRIDE;
            if (coded)
                decode(a->value_codes + value_offset + (p->done + start + t) * bytes, bits, a->value_dim, to);
            else if (fine)
                for (int64_t i = 0; i < a->value_dim; i++) to[i] = a->fine_values[from + i];
            else
                numbers(a->exact_values, a->exact_kind, from, a->value_dim, to);
        }
        for (int64_t j = 0; j < n; j++) {
            float *mixed = state + j * (2 * value_pad + 4) + (coded ? 0 : value_pad);
            for (int64_t i = 0; i < value_pad; i += LANES) {
                vector sum = *(vector *)(mixed + i);
                for (int64_t t = 0; t < size; t++) sum += weight[j][start + t] * *(vector *)(tile + t * STRIDE + i);
                *(vector *)(mixed + i) = sum;
            }
        }
    }
}

static void prepare(const arguments *a, int64_t head, head_query *q) {
    memset(q->plain, 0, sizeof q->plain);
    memset(q->ordered, 0, sizeof q->ordered);
    float mean[MAX_DIM], deviation[MAX_DIM];
    numbers(a->key_mean, a->frame_kind, head * a->key_dim, a->key_dim, mean);
    numbers(a->key_deviation, a->frame_kind, head * a->key_dim, a->key_dim, deviation);
    for (int64_t j = 0; j < a->queries; j++) {
        const float *own = a->query + (head * a->queries + j) * a->key_dim;
        q->mean[j] = dot(own, mean, a->key_dim);
        q->sum[j] = 0;
        for (int64_t i = 0; i < a->key_dim; i++) {
            int64_t channel = a->order[head * a->key_dim + i];
            q->sum[j] += q->plain[j][i] = own[i];
            q->ordered[j][i] = own[channel] * deviation[channel];
        }
    }
}

// 0, or 1 where memory ran out.
int kvfold_graded_attend(const arguments *a) {
    int64_t heads = a->heads, n = a->queries, grades = a->grades, kinds = grades + 2, pieces = 0, first = 0;
    int64_t value_pad = padded(a->value_dim), query_state = 2 * value_pad + 4, head_state = n * query_state;
    for (int64_t i = 0; i < heads * kinds; i++) pieces += (a->counts[i] + PIECE - 1) / PIECE;
    int threads = (int)(a->threads < pieces ? a->threads : pieces);
    if (threads < 1) threads = 1;
    int64_t *key_offsets = calloc((size_t)(heads * grades * (a->widths + 1) + 1), sizeof *key_offsets);
    int64_t *value_offsets = key_offsets ? key_offsets + heads * grades * a->widths : 0;
    piece *list = malloc((size_t)(pieces + 1) * sizeof *list), *next = list;
    head_query *queries = malloc((size_t)heads * sizeof *queries);
    float *states = calloc((size_t)(threads * heads * head_state), sizeof *states);
    int failed = !key_offsets || !list || !queries || !states;
    if (failed) goto done;

    int64_t offset = 0;
    for (int64_t w = 0; w < a->widths; w++)
        for (int64_t i = 0; i < heads * grades; i++) {
            key_offsets[i * a->widths + w] = offset;
            offset += a->counts[i / grades * kinds + i % grades] * packed_bytes(a->key_counts[i * a->widths + w], a->width[w]);
        }
    offset = 0;
    for (int bits = 8; bits > 0; bits--)
        for (int64_t i = 0; i < heads * grades; i++)
            if (a->value_bits[i] == bits) {
                value_offsets[i] = offset;
                offset += a->counts[i / grades * kinds + i % grades] * packed_bytes(a->value_dim, bits);
            }
    int64_t used[3] = {0}; // coded, fine and exact tokens of heads before
    for (int64_t head = 0; head < heads; head++) {
        int64_t start = 0;
        prepare(a, head, queries + head);
        queries[head].first = first;
        for (int64_t grade = 0; grade < kinds; grade++) {
            int64_t count = a->counts[head * kinds + grade];
            int64_t *codes = used + (grade < grades ? 0 : grade - grades + 1);
            for (int64_t done = 0; done < count; done += PIECE) {
                int64_t size = count - done < PIECE ? count - done : PIECE;
                *next++ = (piece){head, grade, size, start + done, done, *codes + done};
            }
            *codes += count;
            start += count;
        }
        first += start;
    }
    for (int64_t i = 0; i < threads * heads * n; i++) states[i * query_state + 2 * value_pad] = -INFINITY;

#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t i = 0; i < pieces; i++) {
        const piece *p = list + i;
        int64_t thread = 0, at = p->grade < grades ? p->head * grades + p->grade : 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        float *state = states + (thread * heads + p->head) * head_state;
        attend(a, queries + p->head, p, key_offsets + at * a->widths, value_offsets[at], state);
    }

    for (int64_t i = 0; i < heads * n; i++) {
        float *to = states + i * query_state, *sums = to + 2 * value_pad, peak = -INFINITY;
        for (int64_t thread = 0; thread < threads; thread++) {
            float other = sums[thread * heads * head_state];
            peak = other > peak ? other : peak;
        }
        for (int64_t thread = 0; thread < threads && peak > -INFINITY; thread++) {
            float *from = to + thread * heads * head_state, shrink = exponential(from[2 * value_pad] - peak);
            for (int64_t k = 0; k < query_state; k++)
                if (k != 2 * value_pad) to[k] = (thread ? to[k] : 0) + shrink * from[k];
        }
        int64_t head = i / n;
        float scale = sums[1] > 0 ? 1 / sums[1] : 0, magnitude = a->value_magnitude[head];
        for (int64_t k = 0; k < a->value_dim; k++) {
            float mean = number(a->value_mean, a->frame_kind, head * a->value_dim + k);
            a->rotated[i * a->value_dim + k] = to[k] * scale * magnitude;
            a->plain[i * a->value_dim + k] = (to[value_pad + k] + sums[2] * mean + sums[3]) * scale;
        }
        a->lse[i] = sums[1] > 0 ? peak + logf(sums[1]) : -INFINITY;
    }
done:
    free(key_offsets), free(list), free(queries), free(states);
    return failed;
}
