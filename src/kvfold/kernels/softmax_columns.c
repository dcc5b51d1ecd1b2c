// Column sums of softmax weights, or of their squares, over rows of logits; see softmax_columns.py.

#include "exponential.h"

#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif

typedef uint32_t alias __attribute__((may_alias));

// Adds to sums (heads, tokens); logits (heads, rows, tokens) are float32, or bfloat16 where half is set.
// 0, or 1 where memory ran out.
int kvfold_softmax_columns(const void *logits, int64_t half, int64_t heads, int64_t rows, int64_t tokens,
                           int64_t squared, int64_t threads, float *sums) {
    if (threads < 1) threads = 1;
    float *work = calloc((size_t)(threads * (heads + 1) * tokens), sizeof *work);
    if (!work) return 1;
#pragma omp parallel for num_threads((int)threads) schedule(static) if (threads > 1)
    for (int64_t row = 0; row < heads * rows; row++) {
        int64_t thread = 0;
#ifdef _OPENMP
        thread = omp_get_thread_num();
#endif
        float *own = work + thread * (heads + 1) * tokens, *to = own + (row / rows + 1) * tokens;
        float peak = -INFINITY, total = 0;
        if (half) {
            const uint16_t *from = (const uint16_t *)logits + row * tokens;
            alias *bits = (alias *)own;
            for (int64_t t = 0; t < tokens; t++) bits[t] = (uint32_t)from[t] << 16;
        } else {
            memcpy(own, (const float *)logits + row * tokens, (size_t)tokens * sizeof *own);
        }
        for (int64_t t = 0; t < tokens; t++) peak = own[t] > peak ? own[t] : peak;
        for (int64_t t = 0; t < tokens; t++) total += own[t] = exponential(own[t] - peak);
        float scale = total > 0 ? 1 / total : 0;
        if (squared)
            for (int64_t t = 0; t < tokens; t++) to[t] += own[t] * own[t] * (scale * scale);
        else
            for (int64_t t = 0; t < tokens; t++) to[t] += own[t] * scale;
    }
    for (int64_t thread = 0; thread < threads; thread++)
        for (int64_t i = 0; i < heads * tokens; i++) sums[i] += work[thread * (heads + 1) * tokens + tokens + i];
    free(work);
    return 0;
}
