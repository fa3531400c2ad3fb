/* The clipped sum of a softmax regression over fixed rows; kernels.h says what is returned. */
#include <math.h>

#include "checks.h"
#include "loops.h"

/* Whether all values are from 0 to below `end`. */
static enum status within(struct integers values, int64_t end) {
    for (int64_t i = 0; i < values.count; i++)
        if (values.values[i] < 0 || values.values[i] >= end) return OUT_OF_RANGE;
    return OK;
}

int32_t head_sums(int32_t path, struct floats rows, struct integers chosen, struct integers targets,
                  struct doubles squares, struct floats w, struct floats bias, double bound, int64_t count,
                  int64_t length, int64_t classes, struct floats weights, struct floats biases,
                  struct doubles norms, struct floats losses) {
    const struct loops *loops = loops_of(path);
    if (loops == NULL || loops->lanes == 0 || classes > CLASSES) return UNSUPPORTED;
    if (count < 0 || length < 1 || classes < 1) return WRONG_SIZE;
    int64_t num_rows = rows.count / length, numbered = chosen.count > 0 ? count : 0;
    REQUIRE(FITS(rows, PRODUCT(num_rows, length)));
    REQUIRE(FITS(chosen, numbered));
    REQUIRE(FITS(targets, count));
    REQUIRE(FITS(squares, count));
    REQUIRE(FITS(w, PRODUCT(classes, length)));
    REQUIRE(FITS(bias, classes));
    REQUIRE(FITS(weights, PRODUCT(classes, length)));
    REQUIRE(FITS(biases, classes));
    REQUIRE(FITS(norms, count));
    REQUIRE(FITS(losses, count));
    REQUIRE(within(targets, classes));
    REQUIRE(within(chosen, num_rows));
    if (numbered == 0 && count > num_rows) return WRONG_SIZE;
    if (!(bound >= 0) || !isfinite(bound)) return OUT_OF_RANGE; /* nothing would be clipped */
    struct head_block block = {
        .w = w.values, .bias = bias.values, .bound = bound, .length = length, .classes = classes,
        .weights = weights.values, .biases = biases.values,
    };
    for (int64_t first = 0; first < count; first += BLOCK) {
        block.rows = least(BLOCK, count - first);
        for (int64_t r = 0; r < block.rows; r++)
            block.x[r] = rows.values + (numbered ? chosen.values[first + r] : first + r) * length;
        block.targets = targets.values + first, block.squares = squares.values + first;
        block.norms = norms.values + first, block.losses = losses.values + first;
        loops->add_head_block(&block);
    }
    return OK;
}
