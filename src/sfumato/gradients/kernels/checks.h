/* Whether arguments fit each other. Python has asked the same; a wrong answer here would write past an array. */
#ifndef SFUMATO_CHECKS_H
#define SFUMATO_CHECKS_H

#include <stddef.h>

#include "kernels.h"

/* Leave the function with what `check` says, unless all is well. */
#define REQUIRE(check)                            \
    do {                                          \
        enum status found_ = (check);             \
        if (found_ != OK) return (int32_t)found_; \
    } while (0)

/* The product of sizes; -1 where one is negative or memory could not hold so many doubles. */
#define PRODUCT(...) \
    product_of((const int64_t[]){__VA_ARGS__}, (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))

static inline int64_t product_of(const int64_t *sizes, int count) {
    const int64_t most = (int64_t)(PTRDIFF_MAX / (ptrdiff_t)sizeof(double));
    int64_t product = 1;
    for (int i = 0; i < count; i++) {
        if (sizes[i] < 0 || (sizes[i] > 0 && product > most / sizes[i])) return -1;
        product *= sizes[i];
    }
    return product;
}

/* Whether an array is there, aligned, and has exactly the values that the sizes ask for. */
#define FITS(array, needed) fits((array).values, (array).count, sizeof *(array).values, needed)

static inline enum status fits(const void *values, int64_t count, size_t item, int64_t needed) {
    if (needed < 0 || count != needed) return WRONG_SIZE;
    if (values == NULL && needed > 0) return NO_POINTER;
    return (uintptr_t)values % item == 0 ? OK : MISALIGNED;
}

/* Whether all values are from 0 to below `end`. */
static inline enum status within(struct integers values, int64_t end) {
    for (int64_t i = 0; i < values.count; i++)
        if (values.values[i] < 0 || values.values[i] >= end) return OUT_OF_RANGE;
    return OK;
}

#endif
