/* What the sums over a convolution's positions share. */
#ifndef SFUMATO_CONVOLUTION_H
#define SFUMATO_CONVOLUTION_H

#include "checks.h"
#include "loops.h"

/* Whether all sizes are such that products of two of them, and of a stride with a position, are numbers. */
static inline enum status check_shape(const struct convolution *k) {
    const int64_t least_ones[] = {k->units, k->top, k->left}; /* zero is fine */
    const int64_t others[] = {k->views,        k->height,       k->width,    k->in_height, k->in_width,
                              k->filters,      k->channels,     k->stride_y, k->stride_x,  k->dilation_y,
                              k->dilation_x,   k->kernel_width, k->kernel_height};
    for (size_t i = 0; i < sizeof least_ones / sizeof *least_ones; i++)
        if (least_ones[i] < 0 || least_ones[i] > INT32_MAX) return WRONG_SIZE;
    for (size_t i = 0; i < sizeof others / sizeof *others; i++)
        if (others[i] < 1 || others[i] > INT32_MAX) return WRONG_SIZE;
    return OK;
}

/* The range of output positions whose input, `offset` away, lies inside. */
static inline void inside(int64_t count, int64_t size, int64_t stride, int64_t offset, int64_t *first,
                          int64_t *last) {
    *first = offset < 0 ? (-offset + stride - 1) / stride : 0;
    *last = size > offset ? least(count, (size - 1 - offset) / stride + 1) : 0;
    if (*first > *last) *first = *last;
}

#endif
