// Attention of few queries over rotated codes (stores/rotated.py), straight from their packed bytes, and over exact tokens
// beside them, in one softmax; see rotated_cpu.py.
//
// Queries are turned once into the basis of the codes. The bytes of a tile of tokens are laid side by side: every step is
// then a loop over tokens, whatever the widths and sizes of the groups of channels.

#include "exponential.h"
#include "floats.h"
#include "rotated_groups.h"

#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#ifdef __SSE2__
#include <immintrin.h>
#endif

// FINE: as in position_bias.py; a multiple of TILE, so that a tile's tokens have one coarse turn.
enum { TILE = 32, PIECE = 256, LANES = 8, VECTORS = TILE / LANES, SLICE = 32, BLOCK = 16, FINE = 64, MAX_DIM = 256, MAX_QUERIES = 16 };
enum { MAX_BYTES = MAX_DIM + 3 * MAX_DIM / 2, LOGARITHMS = 3, WORTH_THREADS = 1 << 20 };

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t words __attribute__((vector_size(TILE), aligned(1), may_alias));
typedef float floats[TILE];
typedef uint8_t bytes[TILE];

// Keys or values, as rotated_cpu.py's _Side. Row tensors begin with this row's part.
typedef struct {
    int64_t dim, by_group, most_groups, norm_kind, share_kind, code_bytes, scales; // norm_kind may be LOGARITHMS
    const int64_t *count, *code_start, *scale_start; // of each head: groups, and where its part of a token begins
    const group *groups;                             // of all heads, one head after the other
    const uint8_t *codes;                            // (tokens, code_bytes)
    const void *norms;                               // (tokens, scales)
    const float *units;                              // (scales) with logarithms
    const void *shares;                              // (heads, most_groups) or null
    const void *sinks, *tail;                        // (heads, most_sinks | tail, dim), the tail of the query's kind
} side;

// As rotated_cpu.py's _Arguments.
typedef struct {
    int64_t heads, queries, tokens, threads, first, stop, tail; // tokens from first to before stop are read as sinks
    int64_t order_bytes, query_kind, sink_kind, mean_kind, most_sinks;
    double scaling, softcap, turn_scale; // softcap 0: none; turn_scale: RoPE's own factor
    side keys, values;
    const void *query;          // (heads, queries, key_dim)
    const void *order;          // (heads, key_dim) or null
    const uint8_t *valid;       // (tokens) or null
    const void *mean;           // (heads, key_dim) or null: added to every key, turned to its position if there is a partner
    const int64_t *partner;     // (key_dim), as position_bias.py's Turns has these four
    const float *coarse_cos, *coarse_sin, *fine;
    const float *magnitudes;    // (256) of the logarithms
    const float *before, *before_lse; // attention over other tokens to merge with, or null
    float *output;              // (heads, queries, value_dim)
    float *lse;                 // (heads, queries)
} arguments;

enum { CODED, SINKS, TAIL };

typedef struct {
    int64_t head, kind, start, count;
} piece;

// Where a channel's code lies in the bytes of its head.
typedef struct {
    uint16_t byte[3];
    uint8_t up[3];
} place;

typedef struct {
    float plain[MAX_QUERIES][MAX_DIM], turned[MAX_QUERIES][MAX_DIM];
    float constant[MAX_QUERIES]; // what queries make of a mean that is the same everywhere
    float factors[MAX_QUERIES][MAX_DIM], crossed[MAX_QUERIES][MAX_DIM]; // of fine turns; with each plane's channels exchanged
    const floats *fine;          // (FINE / TILE, key_dim) fine turns, tokens side by side
    const group *key_groups, *value_groups;
    place key_places[MAX_DIM], value_places[MAX_DIM];
} head_state;

static int64_t smaller(int64_t one, int64_t other) { return one < other ? one : other; }

// Floats of one query's running softmax: mixed codes in lanes, mixed exact values, largest logit, total.
static int64_t state_size(const arguments *a) { return a->values.dim * (LANES + 1) + 2; }

// ---- what is done once a call ----

static void find_places(const group *groups, int64_t count, place *to) {
    int64_t byte = 0;
    for (int64_t g = 0; g < count; to += groups[g++].channels)
        for (int64_t p = 0; planes[groups[g].width][p]; p++) {
            int width = planes[groups[g].width][p];
            int64_t size = (groups[g].channels * width + 7) / 8;
            for (int64_t c = 0, i = 0, up = 0; c < groups[g].channels; c++) {
                to[c].byte[p] = (uint16_t)(byte + i);
                to[c].up[p] = (uint8_t)up;
                if (++i == size) i = 0, up += width;
            }
            byte += size;
        }
}

static void prepare_head(const arguments *a, int64_t head, head_state *h) {
    h->key_groups = a->keys.groups, h->value_groups = a->values.groups;
    for (int64_t before = 0; before < head; before++) {
        h->key_groups += a->keys.count[before];
        h->value_groups += a->values.count[before];
    }
    find_places(h->key_groups, a->keys.count[head], h->key_places);
    find_places(h->value_groups, a->values.count[head], h->value_places);
}

// What a query makes of the mean.
static void prepare_mean(const arguments *a, int64_t head, int64_t query, head_state *h) {
    const float *own = h->plain[query];
    float mean[MAX_DIM], *factors = h->factors[query];
    int64_t dim = a->keys.dim;
    h->constant[query] = 0;
    if (!a->mean) return;
    numbers(a->mean, a->mean_kind, head * dim, dim, mean);
    if (!a->partner)
        for (int64_t i = 0; i < dim; i++) h->constant[query] += own[i] * mean[i];
    else {
        for (int64_t i = 0; i < dim; i++) mean[i] *= (float)a->turn_scale;
        for (int64_t i = 0; i < dim; i++) {
            int64_t k = a->partner[i];
            factors[i] = i == k ? own[i] * mean[i]
                       : i < k  ? own[i] * mean[i] + own[k] * mean[k]
                                : own[i] * mean[k] - own[k] * mean[i];
        }
        for (int64_t i = 0; i < dim; i++) h->crossed[query][i] = factors[a->partner[i]];
    }
}

static void prepare_query(const arguments *a, int64_t index, head_state *h) {
    int64_t head = index / a->queries, query = index % a->queries, dim = a->keys.dim;
    float *plain = h->plain[query], *turned = h->turned[query], ordered[MAX_DIM];
    numbers(a->query, a->query_kind, index * dim, dim, plain);
    for (int64_t i = 0; i < dim; i++) plain[i] *= (float)a->scaling;
    for (int64_t i = 0; i < dim; i++) {
        int64_t at = head * dim + i, from = i;
        if (a->order) from = a->order_bytes == 1 ? ((const uint8_t *)a->order)[at] : ((const int16_t *)a->order)[at];
        ordered[i] = plain[from];
    }
    const group *one = h->key_groups;
    for (int64_t g = 0, from = 0; g < a->keys.count[head]; from += one++->channels, g++)
        for (int64_t i = 0; i < one->channels; i++) {
            const float *row = one->rotation + i * one->channels;
            float sum = 0;
            for (int64_t k = 0; k < one->channels; k++) sum += row[k] * ordered[from + k];
            turned[from + i] = sum;
        }
    prepare_mean(a, head, query, h);
}

// ---- a tile of codes ----

#ifdef __SSE2__
// 16 bytes each of 16 tokens, side by side.
static void beside_block(const uint8_t *from, int64_t stride, uint8_t *to) {
    __m128i x[BLOCK], y[BLOCK];
    for (int t = 0; t < BLOCK; t++) x[t] = _mm_loadu_si128((const __m128i *)(from + t * stride));
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < BLOCK / 2; i++) {
            y[2 * i] = _mm_unpacklo_epi8(x[i], x[i + BLOCK / 2]);
            y[2 * i + 1] = _mm_unpackhi_epi8(x[i], x[i + BLOCK / 2]);
        }
        memcpy(x, y, sizeof x);
    }
    for (int b = 0; b < BLOCK; b++) _mm_storeu_si128((__m128i *)(to + b * TILE), x[b]);
}
#else
static void beside_block(const uint8_t *from, int64_t stride, uint8_t *to) {
    for (int t = 0; t < BLOCK; t++)
        for (int b = 0; b < BLOCK; b++) to[b * TILE + t] = from[t * stride + b];
}
#endif

// `size` bytes each of up to TILE tokens, side by side; nothing beyond them is touched.
static void beside(const uint8_t *from, int64_t stride, int64_t tokens, int64_t size, bytes *to) {
    if (tokens == TILE && size >= BLOCK) {
        for (int64_t b = 0; b < size; b += BLOCK) {
            int64_t at = smaller(b, size - BLOCK); // the last block overlaps the one before
            for (int64_t t = 0; t < TILE; t += BLOCK) beside_block(from + t * stride + at, stride, to[at] + t);
        }
        return;
    }
    if (tokens < TILE) memset(to, 0, (size_t)size * sizeof *to);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t b = 0; b < size; b++) to[b][t] = from[t * stride + b];
}

// Codes of one channel. Bits that a shift of 16 carries over from the neighbour are masked.
static inline words codes_of(const bytes *packed, const place *at, const int *plane) {
    words codes = {0};
    for (int p = 0, low = 0; plane[p]; low += plane[p++]) {
        uint16_t mask = (uint16_t)(((1 << plane[p]) - 1) * 0x0101);
        codes |= (*(const words *)packed[at->byte[p]] >> at->up[p] & mask) << low;
    }
    return codes;
}

#ifdef __AVX2__
// Levels of a tile's codes from a table of 8 or 16.
static inline void looked_up(words codes, const float *table, int wide, float *to) {
    const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
    union { words all; __m128i half[2]; } parts = {codes};
    for (int i = 0; i < VECTORS; i++) {
        __m128i eight = i % 2 ? _mm_srli_si128(parts.half[i / 2], 8) : parts.half[i / 2];
        __m256i index = _mm256_cvtepu8_epi32(eight);
        __m256 level = _mm256_permutevar8x32_ps(low, index);
        if (wide) {
            __m256 other = _mm256_permutevar8x32_ps(high, index); // which half: the code's bit 3, moved to the sign
            level = _mm256_blendv_ps(level, other, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
        }
        _mm256_storeu_ps(to + i * LANES, level);
    }
}
#endif

// Levels of up to SLICE channels of a group.
static void levels_of(const bytes *packed, const place *at, const group *one, int64_t channels, floats *to) {
    const int *plane = planes[one->width];
#ifdef __AVX2__
    float table[16] = {0};
    if (one->width <= 4) memcpy(table, one->levels, sizeof(float) << one->width);
    // One loop for each width, so that the compiler knows its planes.
    switch (one->width) {
#define LOOP(WIDTH)                                                                                                    \
    case WIDTH:                                                                                                        \
        for (int64_t c = 0; c < channels; c++) looked_up(codes_of(packed, at + c, planes[WIDTH]), table, WIDTH > 3, to[c]); \
        return;
        LOOP(1) LOOP(2) LOOP(3) LOOP(4)
#undef LOOP
    }
#endif
    for (int64_t c = 0; c < channels; c++) {
        words codes = codes_of(packed, at + c, plane);
        bytes each;
        memcpy(each, &codes, sizeof each);
        for (int t = 0; t < TILE; t++) to[c][t] = one->levels[each[t]];
    }
}

// What the levels of one group are multiplied by in each token of a tile; 0 beyond them.
static void scales_of(const arguments *a, const side *s, int64_t head, int64_t g, double even, int64_t start,
                      int64_t count, float *to) {
    int64_t at = s->scale_start[head] + (s->by_group ? g : 0);
    float factor = s->by_group ? 1 : (float)even;
    if (!s->by_group && s->shares) factor = number(s->shares, s->share_kind, head * s->most_groups + g);
    if (s->norm_kind == LOGARITHMS) {
        const uint8_t *norms = (const uint8_t *)s->norms + start * s->scales + at;
        factor *= s->units[at];
        for (int64_t t = 0; t < count; t++) to[t] = a->magnitudes[norms[t * s->scales]] * factor;
    } else
        for (int64_t t = 0; t < count; t++)
            to[t] = number(s->norms, s->norm_kind, (start + t) * s->scales + at) * factor;
    for (int64_t t = count; t < TILE; t++) to[t] = 0;
}

// Adds products of one query, or of two, with some channels of a tile to its sums.
static inline void products(const float *one, const float *two, int pair, const floats *levels, int64_t channels,
                            float *to_one, float *to_two) {
    vector a[VECTORS], b[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        a[v] = *(vector *)(to_one + v * LANES);
        if (pair) b[v] = *(vector *)(to_two + v * LANES);
    }
    for (int64_t c = 0; c < channels; c++)
        for (int v = 0; v < VECTORS; v++) {
            vector level = *(const vector *)(levels[c] + v * LANES);
            a[v] += level * one[c];
            if (pair) b[v] += level * two[c];
        }
    for (int v = 0; v < VECTORS; v++) {
        *(vector *)(to_one + v * LANES) = a[v];
        if (pair) *(vector *)(to_two + v * LANES) = b[v];
    }
}

// Logits that the mean gives in a tile.
static void mean_tile(const arguments *a, const head_state *h, int64_t start, float logits[][PIECE]) {
    int64_t n = a->queries, dim = a->keys.dim, coarse = start / FINE * dim;
    for (int64_t j = 0; j < n; j++)
        for (int t = 0; t < TILE; t++) logits[j][t] = h->constant[j];
    for (int64_t j = 0; a->mean && a->partner && j < n; j += 2) {
        float back[2][MAX_DIM];
        int pair = j + 1 < n;
        for (int k = 0; k <= pair; k++)
            for (int64_t i = 0; i < dim; i++)
                back[k][i] = h->factors[j + k][i] * a->coarse_cos[coarse + i] - h->crossed[j + k][i] * a->coarse_sin[coarse + i];
        const floats *fine = h->fine + start % FINE / TILE * dim;
        if (pair)
            products(back[0], back[1], 1, fine, dim, logits[j], logits[j + 1]);
        else
            products(back[0], 0, 0, fine, dim, logits[j], 0);
    }
}

// Logits of a tile of keys.
static void key_tile(const arguments *a, const head_state *h, int64_t head, int64_t start, int64_t count,
                     float logits[][PIECE]) {
    const side *s = &a->keys;
    const group *one = h->key_groups;
    int64_t n = a->queries;
    bytes packed[MAX_BYTES];
    beside(s->codes + start * s->code_bytes + s->code_start[head], s->code_bytes, count,
           s->code_start[head + 1] - s->code_start[head], packed);
    mean_tile(a, h, start, logits);
    for (int64_t g = 0, from = 0; g < s->count[head]; from += one++->channels, g++) {
        floats sums[MAX_QUERIES], levels[SLICE], scale;
        memset(sums, 0, (size_t)n * sizeof *sums);
        for (int64_t c = 0; c < one->channels; c += SLICE) {
            int64_t some = smaller(one->channels - c, SLICE), at = from + c, j = 0;
            levels_of(packed, h->key_places + at, one, some, levels);
            for (; j + 2 <= n; j += 2)
                products(h->turned[j] + at, h->turned[j + 1] + at, 1, levels, some, sums[j], sums[j + 1]);
            if (j < n) products(h->turned[j] + at, 0, 0, levels, some, sums[j], 0);
        }
        scales_of(a, s, head, g, one->share, start, count, scale);
        for (int64_t j = 0; j < n; j++)
            for (int t = 0; t < TILE; t++) logits[j][t] += sums[j][t] * scale[t];
    }
}

// Mixes a tile of values into the queries' states.
static void value_tile(const arguments *a, const head_state *h, int64_t head, int64_t start, int64_t count,
                       float weights[][PIECE], float *state) {
    const side *s = &a->values;
    const group *one = h->value_groups;
    bytes packed[MAX_BYTES];
    beside(s->codes + start * s->code_bytes + s->code_start[head], s->code_bytes, count,
           s->code_start[head + 1] - s->code_start[head], packed);
    for (int64_t g = 0, from = 0; g < s->count[head]; from += one++->channels, g++) {
        floats levels[SLICE], scale;
        scales_of(a, s, head, g, one->share, start, count, scale);
        for (int64_t c = 0; c < one->channels; c += SLICE) {
            int64_t some = smaller(one->channels - c, SLICE);
            levels_of(packed, h->value_places + from + c, one, some, levels);
            for (int64_t j = 0; j < a->queries; j++) {
                float *mixed = state + j * state_size(a) + (from + c) * LANES;
                vector weight[VECTORS];
                for (int v = 0; v < VECTORS; v++)
                    weight[v] = *(vector *)(weights[j] + v * LANES) * *(vector *)(scale + v * LANES);
                for (int64_t i = 0; i < some; i++) {
                    const vector *level = (const vector *)levels[i];
                    vector *to = (vector *)(mixed + i * LANES);
                    *to += (weight[0] * level[0] + weight[1] * level[1]) + (weight[2] * level[2] + weight[3] * level[3]);
                }
            }
        }
    }
}

// ---- a piece of tokens ----

// Turns logits into weights, in place, and keeps the running softmax.
static void soften(const arguments *a, float *logits, int64_t count, float *one) {
    int64_t size = state_size(a);
    float *sums = one + size - 2, peak = sums[0], mass = 0;
    for (int64_t t = 0; t < count; t++) peak = logits[t] > peak ? logits[t] : peak;
    float shrink = exponential(sums[0] - peak);
    for (int64_t i = 0; shrink != 1 && i < size; i++) one[i] *= shrink;
    for (int64_t t = 0; t < count; t++) mass += logits[t] = exponential(logits[t] - peak);
    sums[0] = peak;
    sums[1] += mass;
}

static void cap(const arguments *a, float *logits, int64_t count) {
    for (int64_t t = 0; a->softcap > 0 && t < count; t++)
        logits[t] = tanhf(logits[t] / (float)a->softcap) * (float)a->softcap;
}

static void coded(const arguments *a, const head_state *h, const piece *p, float *state) {
    float logits[MAX_QUERIES][PIECE];
    uint8_t hidden[PIECE];
    int64_t seen = 0;
    for (int64_t t = 0; t < p->count; t++) {
        int64_t token = p->start + t;
        hidden[t] = (token >= a->first && token < a->stop) || (a->valid && !a->valid[token]);
        seen += !hidden[t];
    }
    if (!seen) return;
    for (int64_t start = 0; start < p->count; start += TILE)
        key_tile(a, h, p->head, p->start + start, smaller(p->count - start, TILE), (float(*)[PIECE])(logits[0] + start));
    for (int64_t j = 0; j < a->queries; j++) {
        cap(a, logits[j], p->count);
        for (int64_t t = 0; seen < p->count && t < p->count; t++) logits[j][t] = hidden[t] ? -INFINITY : logits[j][t];
        soften(a, logits[j], p->count, state + j * state_size(a));
        for (int64_t t = p->count; t % TILE; t++) logits[j][t] = 0;
    }
    for (int64_t start = 0; start < p->count; start += TILE)
        value_tile(a, h, p->head, p->start + start, smaller(p->count - start, TILE), (float(*)[PIECE])(logits[0] + start),
                   state);
}

static void exact(const arguments *a, const head_state *h, const piece *p, float *state) {
    float logits[MAX_QUERIES][PIECE], row[MAX_DIM];
    const void *keys = p->kind == TAIL ? a->keys.tail : a->keys.sinks;
    const void *values = p->kind == TAIL ? a->values.tail : a->values.sinks;
    int64_t kind = p->kind == TAIL ? a->query_kind : a->sink_kind, key_dim = a->keys.dim, dim = a->values.dim;
    int64_t first = p->head * (p->kind == TAIL ? a->tail : a->most_sinks) + p->start;
    for (int64_t t = 0; t < p->count; t++) {
        numbers(keys, kind, (first + t) * key_dim, key_dim, row);
        for (int64_t j = 0; j < a->queries; j++) {
            float sum = 0;
            for (int64_t i = 0; i < key_dim; i++) sum += row[i] * h->plain[j][i];
            logits[j][t] = sum;
        }
    }
    for (int64_t j = 0; j < a->queries; j++) {
        cap(a, logits[j], p->count);
        soften(a, logits[j], p->count, state + j * state_size(a));
    }
    for (int64_t t = 0; t < p->count; t++) {
        numbers(values, kind, (first + t) * dim, dim, row);
        for (int64_t j = 0; j < a->queries; j++) {
            float *mixed = state + j * state_size(a) + dim * LANES, weight = logits[j][t];
            for (int64_t i = 0; i < dim; i++) mixed[i] += weight * row[i];
        }
    }
}

// ---- the end ----

// Merges the threads' states of one query, turns its coded values back, and merges with what is there already.
static void finish(const arguments *a, int64_t index, int64_t threads, int64_t thread_state, const head_state *h,
                   const float *state) {
    int64_t dim = a->values.dim, size = state_size(a);
    float *output = a->output + index * dim, peak = -INFINITY, mass = 0, mixed[MAX_DIM] = {0};
    for (int64_t thread = 0; thread < threads; thread++) {
        float other = state[thread * thread_state + size - 2];
        peak = other > peak ? other : peak;
    }
    for (int64_t i = 0; i < dim; i++) output[i] = 0;
    for (int64_t thread = 0; thread < threads && peak > -INFINITY; thread++) {
        const float *from = state + thread * thread_state;
        float shrink = exponential(from[size - 2] - peak);
        if (shrink == 0) continue;
        mass += shrink * from[size - 1];
        for (int64_t i = 0; i < dim; i++) {
            float sum = 0;
            for (int k = 0; k < LANES; k++) sum += from[i * LANES + k];
            mixed[i] += shrink * sum;
            output[i] += shrink * from[dim * LANES + i];
        }
    }
    const group *one = h->value_groups;
    for (int64_t g = 0, from = 0; g < a->values.count[index / a->queries]; from += one++->channels, g++)
        for (int64_t i = 0; i < one->channels; i++) {
            const float *row = one->rotation + i * one->channels;
            for (int64_t k = 0; k < one->channels; k++) output[from + k] += mixed[from + i] * row[k];
        }
    float before = a->before ? a->before_lse[index] : -INFINITY, lse = -INFINITY, kept = 0, scale = 0;
    if (mass > 0) lse = peak + logf(mass), scale = 1 / mass;
    if (before > -INFINITY) {
        float top = before > lse ? before : lse, former = exponential(before - top), other = exponential(lse - top);
        kept = former / (former + other), scale *= other / (former + other);
        lse = top + logf(former + other);
    }
    a->lse[index] = lse;
    for (int64_t i = 0; i < dim; i++) output[i] = output[i] * scale + (kept > 0 ? kept * a->before[index * dim + i] : 0);
}

static piece *cut(piece *to, int64_t head, int64_t kind, int64_t count) {
    for (int64_t start = 0; start < count; start += PIECE)
        *to++ = (piece){head, kind, start, smaller(count - start, PIECE)};
    return to;
}

// 0, or 1 where memory ran out.
int kvfold_rotated_attend(const arguments *a) {
    int64_t heads = a->heads, n = a->queries, size = state_size(a), sinks = a->stop - a->first;
    int64_t most = heads * ((a->tokens + PIECE - 1) / PIECE + (sinks + PIECE - 1) / PIECE + (a->tail + PIECE - 1) / PIECE);
    int threads = (int)smaller(a->threads, most);
    if (threads < 1) threads = 1;
    int64_t thread_state = heads * n * size;
    piece *list = malloc((size_t)(most + 1) * sizeof *list), *end = list;
    head_state *states = malloc((size_t)heads * sizeof *states);
    floats *fine = malloc((size_t)(a->partner ? FINE / TILE * a->keys.dim : 1) * sizeof *fine);
    float *sums = calloc((size_t)(threads * thread_state), sizeof *sums);
    int failed = !list || !states || !sums || !fine;
    if (failed) goto done;
    int64_t dim = a->keys.dim, columns = (dim + 15) / 16 * 16;
    for (int64_t i = 0; a->partner && i < FINE * dim; i++)
        fine[i / TILE][i % TILE] = a->fine[(i / TILE / dim * TILE + i % TILE) * columns + i / TILE % dim];
    for (int64_t head = 0; head < heads; head++) {
        prepare_head(a, head, states + head);
        states[head].fine = fine;
        end = cut(end, head, CODED, a->tokens);
        end = cut(end, head, SINKS, sinks);
        end = cut(end, head, TAIL, a->tail);
    }
    for (int64_t i = 0; i < threads * heads * n; i++) sums[(i + 1) * size - 2] = -INFINITY;
    int wide = threads > 1 && heads * n * a->keys.dim * a->keys.dim > WORTH_THREADS;
    int64_t pieces = end - list;

#pragma omp parallel for num_threads(threads) schedule(static) if (wide)
    for (int64_t i = 0; i < heads * n; i++) prepare_query(a, i, states + i / n);

#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t i = 0; i < pieces; i++) {
        const piece *p = list + i;
        int64_t thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        float *state = sums + thread * thread_state + p->head * n * size;
        (p->kind == CODED ? coded : exact)(a, states + p->head, p, state);
    }

#pragma omp parallel for num_threads(threads) schedule(static) if (wide)
    for (int64_t i = 0; i < heads * n; i++) finish(a, i, threads, thread_state, states + i / n, sums + i * size);
done:
    free(list), free(states), free(sums), free(fine);
    return failed;
}
