#include <stdint.h>

// One group of channels of a rotated code, as rotated_groups.py's Group.
typedef struct {
    int64_t width, channels;
    const float *rotation, *boundaries, *levels; // (channels, channels), (2^width - 1), (2^width)
    double share;                                // of a unit vector's length, where the caller gives none
} group;

// Widths of the planes that packing.py cuts codes into, low bits first.
static const int planes[9][4] = {{0}, {1}, {2}, {2, 1}, {4}, {4, 1}, {4, 2}, {4, 2, 1}, {8}};
