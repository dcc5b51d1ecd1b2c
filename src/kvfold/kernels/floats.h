#include <math.h>
#include <stdint.h>
#include <string.h>

// Kinds of floats: 0 float32, 1 float16, 2 bfloat16.

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
