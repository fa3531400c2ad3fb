/* What Python calls: sums for which PyTorch reads memory several times, taken in one pass; units' filters.
 *
 * A performance setting: each function has its equal in PyTorch, which the tests compare it with and which is
 * used where no compiler was at hand. Threads share out rows, and each number is summed by one thread in a
 * fixed order, so that results do not depend on the number of threads. Images are (rows, positions,
 * channels): PyTorch's channels last.
 *
 * Every function returns a status and writes nothing unless its arguments fit each other: arrays come with
 * their number of values, which must be what the sizes say. library.py declares all of this once more.
 */
#ifndef SFUMATO_KERNELS_H
#define SFUMATO_KERNELS_H

#include <stdint.h>

enum { VERSION = 4 }; /* one more whenever arguments change; library.py knows it too */

enum status { OK, NO_POINTER, MISALIGNED, WRONG_SIZE, OUT_OF_RANGE, NO_MEMORY, UNSUPPORTED };

/* Instruction sets; a build has those of its processor family, a processor some of them. */
enum path { PLAIN, AVX2, AVX512, NEON };

enum { STRETCH = 1024 }; /* positions of a unit that are summed at once in bfloat16 */

struct floats { float *values; int64_t count; };
struct halves { uint16_t *values; int64_t count; }; /* bfloat16: the upper half of a float */
struct doubles { double *values; int64_t count; };
struct integers { int64_t *values; int64_t count; };

/* `top` and `left` are the zeros before the input; the output has height x width positions. */
struct convolution {
    int64_t units, views, height, width, in_height, in_width, filters, channels;
    int64_t kernel_height, kernel_width, stride_y, stride_x, dilation_y, dilation_x, top, left;
};

int32_t kernels_version(void);

/* Numbers in a vector of the path's tiles, which unit_filters and head_sums need; 0: it has no tiles;
 * -1: the path is not there, in this build or on this processor. */
int32_t kernels_lanes(int32_t path);

/* Whether the path multiplies pairs of bfloat16, which low_filters and low_filter_sum need. */
int32_t kernels_pairs(int32_t path);

/* (rows, channels): sums over positions of g and of g * x. */
int32_t channel_sums(int32_t path, struct floats g, struct floats x, int64_t rows, int64_t positions,
                     int64_t channels, struct floats sums, struct floats products);

/* Backward pass of group norm: the input's gradient, and each row's gradients of scale and shift. */
int32_t group_norm_backward(int32_t path, struct floats g, struct floats x, struct floats mean,
                            struct floats inverse, struct floats weight, int64_t rows, int64_t positions,
                            int64_t channels, int64_t groups, struct floats gradient, struct floats scale,
                            struct floats shift);

/* The same of images in bfloat16: all is summed as above, and the input's gradient is rounded. */
int32_t low_group_norm_backward(int32_t path, struct halves g, struct halves x, struct floats mean,
                                struct floats inverse, struct floats weight, int64_t rows, int64_t positions,
                                int64_t channels, int64_t groups, struct halves gradient, struct floats scale,
                                struct floats shift);

/* Adds to `total` the sum over units of factor * values, (units, length): in float over 8 units, in double
 * beyond. A unit of factor 0 is not read. */
int32_t weighted_sum(int32_t path, struct floats values, struct floats factors, int64_t units, int64_t length,
                     struct doubles total);
int32_t low_weighted_sum(int32_t path, struct halves values, struct floats factors, int64_t units,
                         int64_t length, struct doubles total);

/* (3, units, filters): of each filter v the sum of squares, the sum, and the product with its direction u.
 * A filter consists of `parts` pieces of `length` values; those of one unit lie `apart` from each other. */
int32_t filter_moments(int32_t path, struct floats values, struct floats directions, int64_t parts,
                       int64_t apart, int64_t units, int64_t filters, int64_t length, struct doubles moments);

/* Each unit's gradient of the filters, (units, filters, kernel height, kernel width, channels), and while it
 * is in cache its moments (3, units, filters); the gradient of the bias, (units, filters). */
int32_t unit_filters(int32_t path, const struct convolution *shape, struct floats g, struct floats x,
                     struct floats directions, struct floats result, struct doubles moments,
                     struct floats shifts);

/* unit_filters of images in bfloat16, summed in float. The gradient is rounded to bfloat16 and its moments are
 * of what was rounded; with an empty `result` it is not kept, and they are of the sums in float. */
int32_t low_filters(int32_t path, const struct convolution *shape, struct halves g, struct halves x,
                    struct floats directions, struct halves result, struct doubles moments,
                    struct floats shifts);

/* Adds to `total` (filters, kernel height, kernel width, channels) the sum over units of factor * gradient,
 * the gradient being bit for bit the one whose moments low_filters gives with an empty result. Units of at most
 * STRETCH positions. A unit of factor 0 is not read. */
int32_t low_filter_sum(int32_t path, const struct convolution *shape, struct halves g, struct halves x,
                       struct floats factors, struct doubles total);

/* The clipped sum of a softmax regression over `count` rows, in one pass over memory and in this thread. A
 * row's gradient has the norm |p - y| * sqrt(square), and counts with `bound` over it where that is below 1;
 * without a finite norm it counts as zero. `chosen` numbers the rows; an empty one means the first rows. Adds
 * to `weights` and `biases`, in float over 128 rows and in double beyond. */
int32_t head_sums(int32_t path, struct floats rows, struct integers chosen, struct integers targets,
                  struct doubles squares, struct floats w, struct floats bias, double bound, int64_t count,
                  int64_t length, int64_t classes, struct doubles weights, struct doubles biases,
                  struct doubles norms, struct floats losses);

#endif
