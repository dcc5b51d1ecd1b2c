// Attention of few queries over graded tokens (stores/graded), straight from their packed codes, and over the exact
// tokens that follow them, in one softmax.
//
// Tokens are taken in pieces of one head and one grade. A piece's keys and values are decoded a tile at a time into a
// small buffer; each thread keeps a running softmax for every head, and these are merged by their largest logits.

#include "exponential.h"
#include "floats.h"

#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#if defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define SHUFFLES 1
#endif

// FINE: as in position_bias.py.
enum { LANES = 16, TILE = 16, PIECE = 256, FINE = 64, MAX_DIM = 256, MAX_QUERIES = 16, STRIDE = MAX_DIM + LANES };

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// As graded_cpu.py's _Arguments has it. Kinds of floats: 0 float32, 1 float16, 2 bfloat16. Frame tensors begin with
// this row's part; buffers are the row's own.
typedef struct {
    int64_t heads, queries, key_dim, value_dim, grades, widths, threads;
    int64_t visible, position_bytes, tail;
    int64_t frame_kind, scale_kind, exact_kind, states_kind;
    double scaling, softcap, turn_scale; // softcap 0: none; turn_scale: RoPE's own factor, which key_turned lacks
    const void *query;       // (heads, queries, key_dim)
    const int64_t *width;    // (widths)
    const int32_t *counts;
    const int16_t *key_counts;
    const uint8_t *value_bits, *order;
    const void *key_turned, *key_mean, *key_deviation, *value_mean; // key_turned may be null
    const float *value_magnitude;
    const void *positions;
    const uint8_t *key_codes, *value_codes, *magnitudes, *fine_keys, *fine_values;
    const void *fine_scales, *exact_keys, *exact_values;
    const void *tail_keys, *tail_values;          // (heads, tail, dim), kind as the query's
    const int64_t *partner;                       // (key_dim), as position_bias.py's Turns has these four
    const float *coarse_cos, *coarse_sin, *fine;
    const float *rotation;                        // (value_dim, value_dim)
    const float *before, *before_lse;             // attention over other tokens to merge with, or null
    float *output;                                // (heads, queries, value_dim)
    float *lse;                                   // (heads, queries)
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

#ifdef SHUFFLES
// As decode below, 16 codes at a time; only bytes of the row are touched.
static int shuffled(const uint8_t *row, int64_t bits, int64_t n, float *to) {
    if (bits == 4) {
        const __m512 table = _mm512_loadu_ps(levels[4]);
        const __m512i shifts = _mm512_set1_epi64(4LL << 32);
        for (int64_t i = 0; i < n; i += 16) {
            int64_t left = (n - i + 1) / 2;
            __m128i bytes = _mm_maskz_loadu_epi8((__mmask16)((1u << (left < 8 ? left : 8)) - 1), row + i / 2);
            __m512i codes = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(bytes, bytes));
            _mm512_storeu_ps(to + i, _mm512_permutexvar_ps(_mm512_srlv_epi32(codes, shifts), table));
        }
    } else if (bits == 2) {
        const __m512 table = _mm512_broadcast_f32x4(_mm_loadu_ps(levels[2]));
        const __m512i shifts = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 2, 4, 6));
        for (int64_t i = 0; i < n; i += 16) {
            int64_t left = (n - i + 3) / 4;
            __m128i bytes = _mm_maskz_loadu_epi8((__mmask16)((1u << (left < 4 ? left : 4)) - 1), row + i / 4);
            bytes = _mm_unpacklo_epi8(bytes, bytes);
            __m512i codes = _mm512_cvtepu8_epi32(_mm_unpacklo_epi16(bytes, bytes));
            _mm512_storeu_ps(to + i, _mm512_permutexvar_ps(_mm512_srlv_epi32(codes, shifts), table));
        }
    } else if (bits == 8) {
        for (int64_t i = 0; i < n; i += 16) {
            int64_t left = n - i;
            __m128i bytes = _mm_maskz_loadu_epi8((__mmask16)((1u << (left < 16 ? left : 16)) - 1), row + i);
            _mm512_storeu_ps(to + i, _mm512_i32gather_ps(_mm512_cvtepu8_epi32(bytes), levels[8], 4));
        }
    }
    return bits == 2 || bits == 4 || bits == 8;
}
#else
static int shuffled(const uint8_t *row, int64_t bits, int64_t n, float *to) {
    return (void)row, (void)bits, (void)n, (void)to, 0;
}
#endif

// Levels of one row of codes. Writes up to LANES - 1 floats more than n.
static void decode(const uint8_t *row, int64_t bits, int64_t n, float *to) {
    if (shuffled(row, bits, n, to)) return;
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

static int64_t padded(int64_t dim) { return (dim + LANES - 1) / LANES * LANES; }

static int64_t smaller(int64_t one, int64_t other) { return one < other ? one : other; }

static vector products(vector sum, const float *one, const float *other, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) sum += *(const vector *)(one + i) * *(const vector *)(other + i);
    return sum;
}

static float total(vector v) {
#ifdef SHUFFLES
    return _mm512_reduce_add_ps((__m512)v);
#else
    union { vector all; float quarter[4][LANES / 4]; } parts = {v};
    float sum[LANES / 4];
    for (int i = 0; i < LANES / 4; i++)
        sum[i] = parts.quarter[0][i] + parts.quarter[1][i] + parts.quarter[2][i] + parts.quarter[3][i];
    return sum[0] + sum[1] + sum[2] + sum[3];
#endif
}

static int64_t position(const arguments *a, int64_t index) {
    return a->position_bytes == 2 ? ((const int16_t *)a->positions)[index] : ((const int32_t *)a->positions)[index];
}

// A head's queries: as they are, ordered like its codes, as factors of the table of fine turns (and with the channels of
// each plane exchanged), and what they make of the mean and of a constant.
typedef struct {
    float plain[MAX_QUERIES][STRIDE], ordered[MAX_QUERIES][STRIDE], factors[MAX_QUERIES][STRIDE];
    float crossed[MAX_QUERIES][STRIDE], mean[MAX_QUERIES], sum[MAX_QUERIES];
    int64_t first; // of the head's tokens in the row
} head_query;

static void prepare(const arguments *a, int64_t head, head_query *q) {
    float mean[MAX_DIM], deviation[MAX_DIM], turned[MAX_DIM];
    int64_t dim = a->key_dim, at = head * dim;
    numbers(a->key_mean, a->frame_kind, at, dim, mean);
    numbers(a->key_deviation, a->frame_kind, at, dim, deviation);
    if (a->key_turned) numbers(a->key_turned, a->frame_kind, at, dim, turned);
    for (int64_t i = 0; a->key_turned && i < dim; i++) turned[i] *= (float)a->turn_scale;
    for (int64_t j = 0; j < a->queries; j++) {
        float *own = q->plain[j], *factors = q->factors[j];
        memset(own + dim, 0, LANES * sizeof *own);
        memset(q->ordered[j] + dim, 0, LANES * sizeof *own);
        numbers(a->query, a->states_kind, at * a->queries + j * dim, dim, own);
        q->mean[j] = q->sum[j] = 0;
        for (int64_t i = 0; i < dim; i++) q->sum[j] += own[i] *= (float)a->scaling;
        for (int64_t i = 0; i < dim; i++) {
            int64_t channel = a->order[at + i];
            q->mean[j] += own[i] * mean[i];
            q->ordered[j][i] = own[channel] * deviation[channel];
        }
        if (!a->key_turned) continue;
        memset(factors + dim, 0, LANES * sizeof *own);
        memset(q->crossed[j] + dim, 0, LANES * sizeof *own);
        for (int64_t i = 0; i < dim; i++) {
            int64_t k = a->partner[i];
            factors[i] = i == k ? own[i] * turned[i]
                       : i < k  ? own[i] * turned[i] + own[k] * turned[k]
                                : own[i] * turned[k] - own[k] * turned[i];
        }
        for (int64_t i = 0; i < dim; i++) q->crossed[j][i] = factors[a->partner[i]];
    }
}

// Keys of up to TILE coded tokens from `start` of a piece.
static void coded_keys(const arguments *a, const piece *p, const int64_t *offsets, int64_t start, int64_t size,
                       float *tile) {
    const int16_t *by_width = a->key_counts + (p->head * a->grades + p->grade) * a->widths;
    for (int64_t w = 0, column = 0; w < a->widths; column += by_width[w++]) {
        int64_t bytes = packed_bytes(by_width[w], a->width[w]);
        const uint8_t *row = a->key_codes + offsets[w] + (p->done + start) * bytes;
        for (int64_t t = 0; t < size; t++)
            decode(row + t * bytes, a->width[w], by_width[w], tile + t * STRIDE + column);
    }
}

// Keys or values of up to TILE fine or exact tokens from `from` on.
static void plain_rows(const void *rows, int64_t kind, int64_t from, int64_t dim, int64_t size, float *tile) {
    for (int64_t t = 0; t < size; t++) {
        if (kind >= 0)
            numbers(rows, kind, (from + t) * dim, dim, tile + t * STRIDE);
        else
            for (int64_t i = 0; i < dim; i++) tile[t * STRIDE + i] = ((const uint8_t *)rows)[(from + t) * dim + i];
    }
}

// Adds a piece to its head's running softmax: for each query rotated and plain values (padded), then peak, total, coded
// mass and what fine values have in all channels. The offsets are those of the piece's grade.
static void attend(const arguments *a, const head_query *q, const piece *p, const int64_t *key_offsets,
                   int64_t value_offset, float *state) {
    float tile[TILE * STRIDE], turned[MAX_QUERIES][STRIDE], weight[MAX_QUERIES][PIECE], factor[PIECE], added[PIECE];
    int64_t n = a->queries, value_pad = padded(a->value_dim), first = q->first + p->start, channels = a->key_dim;
    int64_t where[PIECE], key_pad = padded(a->key_dim), coarse = -1;
    int coded = p->grade < a->grades, fine = p->grade == a->grades, tail = p->grade == a->grades + 2;
    int64_t kind = fine ? -1 : tail ? a->states_kind : a->exact_kind, seen = tail ? p->count : 0;
    for (int64_t t = 0; !tail && t < p->count; t++) seen += (where[t] = position(a, first + t)) < a->visible;
    if (!seen) return;
    if (coded) {
        const int16_t *by_width = a->key_counts + (p->head * a->grades + p->grade) * a->widths;
        channels = 0;
        for (int64_t w = 0; w < a->widths; w++) channels += by_width[w];
    }
    const void *keys = fine ? a->fine_keys : tail ? a->tail_keys : a->exact_keys;
    const void *values = fine ? a->fine_values : tail ? a->tail_values : a->exact_values;
    for (int64_t start = 0; start < p->count; start += TILE) {
        int64_t size = smaller(p->count - start, TILE);
        if (coded)
            coded_keys(a, p, key_offsets, start, size, tile);
        else
            plain_rows(keys, kind, p->codes + start, a->key_dim, size, tile);
        for (int64_t t = 0; t < size; t++) {
            float *row = tile + t * STRIDE;
            const float *table = 0;
            memset(row + channels, 0, LANES * sizeof *row);
            if (coded && a->key_turned) {
                int64_t at = where[start + t];
                table = a->fine + at % FINE * key_pad;
                if (at / FINE != coarse) {
                    coarse = at / FINE;
                    const float *cosine = a->coarse_cos + coarse * a->key_dim;
                    const float *sine = a->coarse_sin + coarse * a->key_dim;
                    for (int64_t j = 0; j < n; j++) {
                        memset(turned[j] + a->key_dim, 0, LANES * sizeof *row);
                        for (int64_t i = 0; i < a->key_dim; i++)
                            turned[j][i] = q->factors[j][i] * cosine[i] - q->crossed[j][i] * sine[i];
                    }
                }
            }
            for (int64_t j = 0; j < n; j++) {
                vector sum = products((vector){0}, coded ? q->ordered[j] : q->plain[j], row, padded(channels));
                if (table) sum = products(sum, turned[j], table, key_pad);
                weight[j][start + t] = total(sum);
            }
        }
    }
    for (int64_t t = 0; fine && t < p->count; t++) {
        factor[t] = number(a->fine_scales, a->scale_kind, 4 * (p->codes + t));
        added[t] = number(a->fine_scales, a->scale_kind, 4 * (p->codes + t) + 1);
    }
    for (int64_t j = 0; j < n; j++) {
        float *own = weight[j], *one = state + j * (2 * value_pad + 4), *sums = one + 2 * value_pad;
        for (int64_t t = 0; coded && t < p->count; t++) own[t] += q->mean[j];
        for (int64_t t = 0; fine && t < p->count; t++) own[t] = own[t] * factor[t] + q->sum[j] * added[t];
        for (int64_t t = 0; a->softcap > 0 && t < p->count; t++)
            own[t] = tanhf(own[t] / (float)a->softcap) * (float)a->softcap;
        for (int64_t t = 0; seen < p->count && t < p->count; t++)
            if (where[t] >= a->visible) own[t] = -INFINITY;
        float peak = sums[0], mass = 0;
        for (int64_t t = 0; t < p->count; t++) peak = own[t] > peak ? own[t] : peak;
        float shrink = exponential(sums[0] - peak);
        for (int64_t i = 0; shrink != 1 && i < 2 * value_pad + 4; i++) one[i] *= shrink;
        for (int64_t t = 0; t < p->count; t++) mass += own[t] = exponential(own[t] - peak);
        sums[0] = peak;
        sums[1] += mass;
        if (coded) sums[2] += mass;
    }
    int64_t bits = coded ? a->value_bits[p->head * a->grades + p->grade] : 8;
    if (!bits) return;
    for (int64_t t = 0; t < p->count && (coded || fine); t++) {
        factor[t] = coded ? magnitude_of[a->magnitudes[p->codes + t]] : number(a->fine_scales, a->scale_kind, 4 * (p->codes + t) + 2);
        added[t] = coded ? 0 : number(a->fine_scales, a->scale_kind, 4 * (p->codes + t) + 3);
    }
    for (int64_t j = 0; j < n && (coded || fine); j++) {
        float *own = weight[j], sum = 0;
        for (int64_t t = 0; t < p->count; t++) sum += own[t] * added[t];
        for (int64_t t = 0; t < p->count; t++) own[t] *= factor[t];
        state[j * (2 * value_pad + 4) + 2 * value_pad + 3] += sum;
    }
    int64_t bytes = packed_bytes(a->value_dim, bits);
    for (int64_t start = 0; start < p->count; start += TILE) {
        int64_t size = smaller(p->count - start, TILE);
        const uint8_t *row = a->value_codes + value_offset + (p->done + start) * bytes;
        for (int64_t t = 0; coded && t < size; t++) decode(row + t * bytes, bits, a->value_dim, tile + t * STRIDE);
        if (!coded) plain_rows(values, kind, p->codes + start, a->value_dim, size, tile);
        for (int64_t j = 0; j < n; j++) {
            float *mixed = state + j * (2 * value_pad + 4) + (coded ? 0 : value_pad);
            const float *own = weight[j] + start;
            int64_t i = 0;
            for (; i + 4 * LANES <= value_pad; i += 4 * LANES) { // four sums at a time hide the time each takes
                vector *to = (vector *)(mixed + i), one = to[0], two = to[1], three = to[2], four = to[3];
                for (int64_t t = 0; t < size; t++) {
                    const vector *from = (const vector *)(tile + t * STRIDE + i);
                    one += own[t] * from[0], two += own[t] * from[1];
                    three += own[t] * from[2], four += own[t] * from[3];
                }
                to[0] = one, to[1] = two, to[2] = three, to[3] = four;
            }
            for (; i < value_pad; i += LANES) {
                vector sum = *(vector *)(mixed + i);
                for (int64_t t = 0; t < size; t++) sum += own[t] * *(const vector *)(tile + t * STRIDE + i);
                *(vector *)(mixed + i) = sum;
            }
        }
    }
}

// Merges the threads' states of one query, turns its coded values back, and merges with what is there already.
static void finish(const arguments *a, int64_t index, int64_t threads, int64_t thread_state, float *to) {
    int64_t dim = a->value_dim, value_pad = padded(dim), size = 2 * value_pad + 4, head = index / a->queries;
    float *sums = to + 2 * value_pad, *output = a->output + index * dim, peak = -INFINITY;
    for (int64_t thread = 0; thread < threads; thread++) {
        float other = sums[thread * thread_state];
        peak = other > peak ? other : peak;
    }
    for (int64_t thread = 0; thread < threads && peak > -INFINITY; thread++) {
        float *from = to + thread * thread_state, shrink = exponential(from[2 * value_pad] - peak);
        for (int64_t k = 0; k < size; k++)
            if (k != 2 * value_pad) to[k] = (thread ? to[k] : 0) + shrink * from[k];
    }
    float before = a->before ? a->before_lse[index] : -INFINITY, lse = -INFINITY, kept = 0, scale = 0;
    if (sums[1] > 0) lse = peak + logf(sums[1]), scale = 1 / sums[1];
    if (before > -INFINITY) {
        float top = before > lse ? before : lse, one = exponential(before - top), other = exponential(lse - top);
        kept = one / (one + other), scale *= other / (one + other);
        lse = top + logf(one + other);
    }
    a->lse[index] = lse;
    for (int64_t k = 0; k < dim; k++) {
        float mean = number(a->value_mean, a->frame_kind, head * dim + k);
        output[k] = (to[value_pad + k] + sums[2] * mean + sums[3]) * scale;
        if (kept > 0) output[k] += kept * a->before[index * dim + k];
    }
    for (int64_t i = 0; i < dim && sums[2] > 0; i++) {
        float rotated = to[i] * scale * a->value_magnitude[head];
        for (int64_t k = 0; k < dim; k++) output[k] += rotated * a->rotation[i * dim + k];
    }
}

// 0, or 1 where memory ran out.
int kvfold_graded_attend(const arguments *a) {
    int64_t heads = a->heads, n = a->queries, grades = a->grades, kinds = grades + 2, first = 0;
    int64_t query_state = 2 * padded(a->value_dim) + 4, head_state = n * query_state;
    int64_t pieces = heads * ((a->tail + PIECE - 1) / PIECE);
    for (int64_t i = 0; i < heads * kinds; i++) pieces += (a->counts[i] + PIECE - 1) / PIECE;
    int threads = (int)smaller(a->threads, pieces);
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
        for (int64_t grade = 0; grade <= kinds; grade++) {
            int64_t tail = head * a->tail, count = grade < kinds ? a->counts[head * kinds + grade] : a->tail;
            int64_t *codes = grade == kinds ? &tail : used + (grade < grades ? 0 : grade - grades + 1);
            for (int64_t done = 0; done < count; done += PIECE)
                *next++ = (piece){head, grade, smaller(count - done, PIECE), start + done, done, *codes + done};
            *codes += count;
            start += grade < kinds ? count : 0;
        }
        first += start;
    }
    for (int64_t i = 0; i < threads * heads * n; i++) states[(i + 1) * query_state - 4] = -INFINITY;

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
    for (int64_t i = 0; i < heads * n; i++) finish(a, i, threads, heads * head_state, states + i * query_state);
done:
    free(key_offsets), free(list), free(queries), free(states);
    return failed;
}
