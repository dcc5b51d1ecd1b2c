// Rotate, normalise, quantise and pack vectors of several heads in one pass; see rotated_encode.py.
//
// A tile of tokens is turned so that tokens lie side by side: every step is then a loop over them, whatever the sizes
// of the groups of channels.

#include "floats.h"
#include "rotated_groups.h"

#include <stdlib.h>

enum { LANES = 32, MAX_DIM = 256, MAX_GROUPS = MAX_DIM / 2, ROWS = 4 };

typedef float floats[LANES];
typedef uint8_t bytes[LANES];

// As rotated_encode.py's _Arguments.
typedef struct {
    int64_t rows, heads, tokens, dim, kind, threads;
    int64_t row_stride, head_stride, token_stride; // of x, in elements
    int64_t by_group, keep_norm, most_groups, code_bytes, scales;
    const int64_t *count, *code_start, *scale_start; // of each head: groups, and where its part of a token begins
    const group *groups;                             // of all heads, one head after the other
    const void *x;
    const uint8_t *order; // (rows, heads, dim) or null
    const float *shares;  // (rows, heads, most_groups) or null
    uint8_t *codes;       // (rows, tokens, code_bytes)
    float *norms;         // (rows, tokens, scales)
} arguments;

// y = rotation x for a tile.
static void rotate(const float *restrict rotation, int64_t n, const floats *restrict x, floats *restrict y) {
    int64_t from = 0;
    for (; from + ROWS <= n; from += ROWS) {
        floats sum[ROWS] = {{0}};
        const float *row = rotation + from * n;
        for (int64_t i = 0; i < n; i++)
            for (int r = 0; r < ROWS; r++)
                for (int t = 0; t < LANES; t++) sum[r][t] += row[r * n + i] * x[i][t];
        memcpy(y + from, sum, sizeof sum);
    }
    for (; from < n; from++) {
        floats sum = {0};
        for (int64_t i = 0; i < n; i++)
            for (int t = 0; t < LANES; t++) sum[t] += rotation[from * n + i] * x[i][t];
        memcpy(y + from, sum, sizeof sum);
    }
}

// Index of the nearest level: how many boundaries lie below.
static void nearest(const float *restrict x, const float *restrict boundaries, int64_t width, int32_t *restrict code) {
    for (int t = 0; t < LANES; t++) code[t] = 0;
    if (width <= 4)
        for (int64_t b = 0; b < (1 << width) - 1; b++)
            for (int t = 0; t < LANES; t++) code[t] += x[t] > boundaries[b];
    else
        for (int32_t half = 1 << (width - 1); half; half >>= 1)
            for (int t = 0; t < LANES; t++) code[t] += x[t] > boundaries[code[t] + half - 1] ? half : 0;
}

// Split packing of packing.py; returns the bytes of a token.
static int64_t pack(const bytes *restrict codes, int64_t n, int64_t width, bytes *restrict to) {
    bytes *start = to;
    int low = 0;
    for (const int *plane = planes[width]; *plane; low += *plane++) {
        int64_t count = (n * *plane + 7) / 8;
        uint8_t mask = (uint8_t)((1 << *plane) - 1);
        memset(to, 0, (size_t)count * sizeof *to);
        for (int64_t c = 0; c < n; c++) {
            int up = (int)(c / count) * *plane;
            for (int t = 0; t < LANES; t++) to[c % count][t] |= (uint8_t)((codes[c][t] >> low & mask) << up);
        }
        to += count;
    }
    return to - start;
}

// 0, or 2 where x is not finite.
static int encode_tile(const arguments *a, const group *groups, int64_t row, int64_t head, int64_t start) {
    floats x[MAX_DIM], y[MAX_DIM], length[MAX_GROUPS], coded[MAX_GROUPS], total = {0}, all = {0};
    bytes codes[MAX_DIM], packed[MAX_DIM + 3 * MAX_GROUPS];
    int64_t count = a->count[head], tokens = a->tokens - start < LANES ? a->tokens - start : LANES;
    const uint8_t *order = a->order ? a->order + (row * a->heads + head) * a->dim : 0;
    const float *shares = a->shares ? a->shares + (row * a->heads + head) * a->most_groups : 0;
    const int64_t at = row * a->row_stride + head * a->head_stride + start * a->token_stride;
    for (int t = 0; t < LANES; t++) {
        float line[MAX_DIM] = {0};
        if (t < tokens) numbers(a->x, a->kind, at + t * a->token_stride, a->dim, line);
        for (int64_t c = 0; c < a->dim; c++) x[c][t] = line[order ? order[c] : c];
    }
    for (int64_t g = 0, from = 0; g < count; from += groups[g++].channels) {
        rotate(groups[g].rotation, groups[g].channels, x + from, y + from);
        floats squares = {0};
        for (int64_t c = from; c < from + groups[g].channels; c++)
            for (int t = 0; t < LANES; t++) squares[t] += y[c][t] * y[c][t];
        for (int t = 0; t < LANES; t++) length[g][t] = sqrtf(squares[t]), total[t] += squares[t];
    }
    int broken = 0;
    for (int t = 0; t < LANES; t++) total[t] = sqrtf(total[t]), broken |= !(total[t] < INFINITY);
    if (broken) return 2;
    bytes *to = packed;
    for (int64_t g = 0, from = 0; g < count; from += groups[g++].channels) {
        const group *one = groups + g;
        float share = shares ? shares[g] : (float)one->share;
        floats factor, squares = {0}, unit;
        int32_t code[LANES];
        for (int t = 0; t < LANES; t++) {
            float by = a->by_group ? length[g][t] : total[t] * share;
            factor[t] = 1 / (by > 1e-30f ? by : 1e-30f);
        }
        for (int64_t c = 0; c < one->channels; c++) {
            for (int t = 0; t < LANES; t++) unit[t] = y[from + c][t] * factor[t];
            nearest(unit, one->boundaries, one->width, code);
            for (int t = 0; t < LANES; t++) {
                float level = one->levels[code[t]];
                squares[t] += level * level;
                codes[c][t] = (uint8_t)code[t];
            }
        }
        to += pack(codes, one->channels, one->width, to);
        for (int t = 0; t < LANES; t++) coded[g][t] = sqrtf(squares[t]), all[t] += squares[t] * (share * share);
    }
    for (int t = 0; t < tokens; t++) {
        int64_t token = row * a->tokens + start + t;
        uint8_t *out = a->codes + token * a->code_bytes + a->code_start[head];
        for (int64_t i = 0; i < to - packed; i++) out[i] = packed[i][t];
        float *norm = a->norms + token * a->scales + a->scale_start[head];
        for (int64_t g = 0; g < (a->by_group ? count : 1); g++) {
            float full = a->by_group ? length[g][t] : total[t], level = a->by_group ? coded[g][t] : sqrtf(all[t]);
            norm[g] = a->keep_norm ? full / (level > 1e-30f ? level : 1e-30f) : full;
        }
    }
    return 0;
}

// 0, or 2 where x is not finite.
int kvfold_rotated_encode(const arguments *a) {
    int64_t tiles = (a->tokens + LANES - 1) / LANES;
    int problem = 0;
#pragma omp parallel for num_threads((int)a->threads) schedule(static) reduction(| : problem) if (a->threads > 1)
    for (int64_t i = 0; i < a->rows * a->heads * tiles; i++) {
        int64_t head = i / tiles % a->heads, first = 0;
        for (int64_t h = 0; h < head; h++) first += a->count[h];
        problem |= encode_tile(a, a->groups + first, i / tiles / a->heads, head, i % tiles * LANES);
    }
    return problem;
}
