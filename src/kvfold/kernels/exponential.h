#include <math.h>
#include <stdint.h>
#include <string.h>

// exp of x <= 0 to about 1e-7, and 0 far below.
static float exponential(float x) {
    float scaled = (x < -87 ? -87 : x) * 1.44269504f, whole = floorf(scaled + 0.5f), rest = scaled - whole;
    float result = 1.5403530e-4f;
    result = result * rest + 1.3333558e-3f;
    result = result * rest + 9.6181291e-3f;
    result = result * rest + 5.5504109e-2f;
    result = result * rest + 2.4022651e-1f;
    result = result * rest + 6.9314718e-1f;
    result = result * rest + 1;
    uint32_t bits = (uint32_t)((int32_t)whole + 127) << 23;
    float power;
    memcpy(&power, &bits, 4);
    return x < -87 ? 0 : result * power;
}
