/* The clipped sum of a softmax regression over fixed rows; kernels.h says what is returned. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "checks.h"
#include "loops.h"

/* total += part, and part is zero again. */
static void empty_into(struct doubles total, float *part) {
    for (int64_t i = 0; i < total.count; i++) total.values[i] += part[i];
    memset(part, 0, sizeof(float) * (size_t)total.count);
}

int32_t head_sums(int32_t path, struct floats rows, struct integers chosen, struct integers targets,
                  struct doubles squares, struct floats w, struct floats bias, double bound, int64_t count,
                  int64_t length, int64_t classes, struct doubles weights, struct doubles biases,
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
    };
    /* In float a row is rounded to the size of the sum that it is added to: the sum must stay short. */
    float *part = calloc((size_t)(weights.count + biases.count), sizeof(float));
    if (part == NULL) return NO_MEMORY;
    block.weights = part, block.biases = part + weights.count;
    for (int64_t first = 0; first < count; first += BLOCK) {
        block.rows = least(BLOCK, count - first);
        for (int64_t r = 0; r < block.rows; r++)
            block.x[r] = rows.values + (numbered ? chosen.values[first + r] : first + r) * length;
        block.targets = targets.values + first, block.squares = squares.values + first;
        block.norms = norms.values + first, block.losses = losses.values + first;
        loops->add_head_block(&block);
        if ((first / BLOCK + 1) % HEAD_BLOCKS == 0 || first + BLOCK >= count) {
            empty_into(weights, block.weights);
            empty_into(biases, block.biases);
        }
    }
    free(part);
    return OK;
}
