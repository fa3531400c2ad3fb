/* Every kernel on every path of this build and processor against obvious loops in double, over random shapes.
 *
 * Without Python, so that it runs under sanitizers, which see each read past an array (all have exactly the
 * size they need), and on a processor that is only emulated. check.sh builds and runs it.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "kernels.h"

static const char *const names[] = {"plain", "avx2", "avx512", "neon"};
static uint64_t state = 1;
static double worst;
static int wrong;

static int64_t draw(int64_t from, int64_t to) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return from + (int64_t)((state >> 33) % (uint64_t)(to - from + 1));
}

static struct floats floats_of(int64_t count) {
    struct floats made = {malloc((size_t)count * sizeof(float)), count};
    for (int64_t i = 0; i < count; i++) made.values[i] = (float)draw(-1000, 1000) / 500;
    return made;
}

static struct doubles doubles_of(int64_t count) {
    struct doubles made = {calloc((size_t)count, sizeof(double)), count};
    return made;
}

/* `size` is that of the terms that were added up: rounding is relative to it. */
static void compare(const char *what, int32_t path, double found, double expected, double size) {
    double error = fabs(found - expected) / (1 + size);
    if (error > worst) worst = error;
    if (error < 2e-5) return;
    wrong++;
    printf("%s on %s: %g instead of %g\n", what, names[path], found, expected);
}

static void done(const char *what, int32_t path, int32_t status) {
    if (status == OK) return;
    wrong++;
    printf("%s on %s: status %d\n", what, names[path], (int)status);
}

static void check_channel_sums(int32_t path) {
    int64_t rows = draw(1, 3), positions = draw(1, 150), channels = draw(1, 140);
    struct floats g = floats_of(rows * positions * channels), x = floats_of(rows * positions * channels);
    struct floats sums = floats_of(rows * channels), products = floats_of(rows * channels);
    done("channel_sums", path, channel_sums(path, g, x, rows, positions, channels, sums, products));
    for (int64_t row = 0; row < rows; row++)
        for (int64_t c = 0; c < channels; c++) {
            double s = 0, p = 0, size = 0;
            for (int64_t t = 0; t < positions; t++) {
                int64_t at = (row * positions + t) * channels + c;
                s += g.values[at], p += (double)g.values[at] * x.values[at], size += 4;
            }
            compare("sum", path, sums.values[row * channels + c], s, size);
            compare("product", path, products.values[row * channels + c], p, size);
        }
    free(g.values), free(x.values), free(sums.values), free(products.values);
}

static void check_group_norm(int32_t path) {
    int64_t rows = draw(1, 3), positions = draw(1, 90), groups = draw(1, 5), width = draw(1, 30);
    int64_t channels = groups * width;
    struct floats g = floats_of(rows * positions * channels), x = floats_of(rows * positions * channels);
    struct floats mean = floats_of(rows * groups), inverse = floats_of(rows * groups), w = floats_of(channels);
    struct floats dx = floats_of(g.count), scale = floats_of(rows * channels), shift = floats_of(rows * channels);
    done("group_norm_backward", path,
         group_norm_backward(path, g, x, mean, inverse, w, rows, positions, channels, groups, dx, scale, shift));
    double n = (double)(width * positions);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t c = 0; c < channels; c++) {
            int64_t group = row * groups + c / width;
            double m = mean.values[group], r = inverse.values[group], S = 0, P = 0, own = 0, along = 0;
            for (int64_t i = c / width * width; i < (c / width + 1) * width; i++)
                for (int64_t t = 0; t < positions; t++) {
                    int64_t at = (row * positions + t) * channels + i;
                    S += w.values[i] * (double)g.values[at];
                    P += w.values[i] * g.values[at] * (x.values[at] - m);
                    if (i == c) own += g.values[at], along += g.values[at] * (x.values[at] - m) * r;
                }
            compare("shift", path, shift.values[row * channels + c], own, 2 * (double)positions);
            compare("scale", path, scale.values[row * channels + c], along, 16 * (double)positions);
            for (int64_t t = 0; t < positions; t++) {
                int64_t at = (row * positions + t) * channels + c;
                double expected = r * w.values[c] * g.values[at] - (x.values[at] - m) * P * r * r * r / n - S * r / n;
                compare("input's gradient", path, dx.values[at], expected, 300);
            }
        }
    free(g.values), free(x.values), free(mean.values), free(inverse.values), free(w.values);
    free(dx.values), free(scale.values), free(shift.values);
}

static void check_filter_moments(int32_t path) {
    int64_t parts = draw(1, 3), units = draw(1, 3), filters = draw(1, 5), length = draw(1, 600);
    int64_t piece = units * filters * length, apart = piece + draw(0, 20);
    struct floats v = floats_of((parts - 1) * apart + piece), u = floats_of(parts * filters * length);
    struct doubles moments = doubles_of(3 * units * filters);
    done("filter_moments", path, filter_moments(path, v, u, parts, apart, units, filters, length, moments));
    for (int64_t row = 0; row < units * filters; row++) {
        double total[3] = {0, 0, 0};
        for (int64_t part = 0; part < parts; part++)
            for (int64_t i = 0; i < length; i++) {
                double value = v.values[part * apart + row * length + i];
                total[0] += value * value, total[1] += value;
                total[2] += value * u.values[(part * filters + row % filters) * length + i];
            }
        for (int i = 0; i < 3; i++)
            compare("moment", path, moments.values[i * units * filters + row], total[i], 4 * (double)(parts * length));
    }
    free(v.values), free(u.values), free(moments.values);
}

/* The gradient of one weight of one unit. */
static double one_weight(const struct convolution *k, const float *g, const float *x, int64_t f, int64_t y,
                         int64_t z, int64_t c) {
    double total = 0;
    for (int64_t view = 0; view < k->views; view++)
        for (int64_t i = 0; i < k->height; i++)
            for (int64_t j = 0; j < k->width; j++) {
                int64_t row = i * k->stride_y + y * k->dilation_y - k->top;
                int64_t column = j * k->stride_x + z * k->dilation_x - k->left;
                if (row < 0 || row >= k->in_height || column < 0 || column >= k->in_width) continue;
                total += (double)g[((view * k->height + i) * k->width + j) * k->filters + f] *
                         x[((view * k->in_height + row) * k->in_width + column) * k->channels + c];
            }
    return total;
}

static void check_unit_filters(int32_t path, int64_t lanes) {
    struct convolution k = {
        draw(1, 3), draw(1, 2), draw(1, 9), draw(1, 9), draw(1, 12), draw(1, 12), draw(1, 14), lanes + draw(0, 70),
        draw(1, 3), draw(1, 3), draw(1, 2), draw(1, 2), draw(1, 2), draw(1, 2), draw(0, 3), draw(0, 3)};
    int64_t outputs = k.views * k.height * k.width * k.filters, inputs = k.views * k.in_height * k.in_width * k.channels;
    int64_t length = k.kernel_height * k.kernel_width * k.channels, count = k.units * k.filters;
    struct floats g = floats_of(k.units * outputs), x = floats_of(k.units * inputs);
    struct floats u = floats_of(k.filters * length), result = floats_of(count * length), shifts = floats_of(count);
    struct doubles moments = doubles_of(3 * count);
    double size = 4 * (double)(k.views * k.height * k.width);
    done("unit_filters", path, unit_filters(path, &k, g, x, u, result, moments, shifts));
    for (int64_t unit = 0; unit < k.units; unit++)
        for (int64_t f = 0; f < k.filters; f++) {
            double square = 0;
            for (int64_t i = 0; i < length; i++) {
                int64_t y = i / (k.kernel_width * k.channels), z = i / k.channels % k.kernel_width;
                double expected = one_weight(&k, g.values + unit * outputs, x.values + unit * inputs, f, y, z, i % k.channels);
                compare("filter", path, result.values[(unit * k.filters + f) * length + i], expected, size);
                square += expected * expected;
            }
            compare("norm", path, moments.values[unit * k.filters + f], square, square);
        }
    free(g.values), free(x.values), free(u.values), free(result.values), free(shifts.values), free(moments.values);
}

/* bfloat16 of the same array's numbers, which become those that were rounded. */
static struct halves halves_of(struct floats wide) {
    struct halves made = {malloc((size_t)wide.count * sizeof(uint16_t)), wide.count};
    for (int64_t i = 0; i < wide.count; i++) {
        union { float value; uint32_t bits; } number = {wide.values[i]};
        made.values[i] = (uint16_t)(number.bits >> 16), number.bits &= 0xffff0000;
        wide.values[i] = number.value;
    }
    return made;
}

static void check_low_filters(int32_t path) {
    struct convolution k = {
        draw(1, 20), draw(1, 3), draw(1, 9), draw(1, 9), draw(1, 12), draw(1, 12), draw(1, 14), draw(1, 80),
        draw(1, 3), draw(1, 3), draw(1, 2), draw(1, 2), draw(1, 2), draw(1, 2), draw(0, 3), draw(0, 3)};
    if (draw(0, 3) == 0) k.units = 1, k.height = draw(40, 50), k.width = draw(40, 50), k.filters = 2;
    int64_t outputs = k.views * k.height * k.width * k.filters, inputs = k.views * k.in_height * k.in_width * k.channels;
    int64_t length = k.kernel_height * k.kernel_width * k.channels, count = k.units * k.filters;
    struct floats wide_g = floats_of(k.units * outputs), wide_x = floats_of(k.units * inputs), factors = floats_of(k.units);
    struct halves g = halves_of(wide_g), x = halves_of(wide_x);
    struct floats u = floats_of(k.filters * length), room = floats_of(count * length), shifts = floats_of(count);
    struct halves result = halves_of(room), none = {NULL, 0};
    struct doubles moments = doubles_of(3 * count), total = doubles_of(k.filters * length);
    double size = 4 * (double)(k.views * k.height * k.width);
    done("low_filters", path, low_filters(path, &k, g, x, u, result, moments, shifts));
    done("low_filters", path, low_filters(path, &k, g, x, u, none, moments, shifts));
    int32_t summed = low_filter_sum(path, &k, g, x, factors, total);
    if (k.views * k.height * k.width <= STRETCH) done("low_filter_sum", path, summed);
    for (int64_t f = 0; f < k.filters; f++)
        for (int64_t i = 0; i < length; i += 7) {
            int64_t y = i / (k.kernel_width * k.channels), z = i / k.channels % k.kernel_width;
            double sum = 0;
            for (int64_t unit = 0; unit < k.units; unit++) {
                double one = one_weight(&k, wide_g.values + unit * outputs, wide_x.values + unit * inputs, f, y, z, i % k.channels);
                union { uint32_t bits; float value; } kept = {(uint32_t)result.values[(unit * k.filters + f) * length + i] << 16};
                compare("low filter", path, kept.value, one, size + fabs(one) * 300);
                sum += factors.values[unit] * one;
            }
            if (summed == OK) compare("low sum", path, total.values[f * length + i], sum, size * 4 * (double)k.units);
        }
    free(wide_g.values), free(wide_x.values), free(g.values), free(x.values), free(u.values), free(room.values);
    free(shifts.values), free(result.values), free(moments.values), free(total.values), free(factors.values);
}

static void check_head(int32_t path) {
    int64_t rows = draw(1, 60), count = draw(1, 70), length = draw(1, 90), classes = draw(1, 20);
    struct floats x = floats_of(rows * length), w = floats_of(classes * length), bias = floats_of(classes);
    struct doubles weights = doubles_of(classes * length), biases = doubles_of(classes);
    struct doubles squares = doubles_of(count), norms = doubles_of(count);
    struct floats losses = floats_of(count);
    struct integers chosen = {malloc((size_t)count * 8), count}, targets = {malloc((size_t)count * 8), count};
    double *expected = calloc((size_t)(classes * length), sizeof(double)), p[20], bound = 0.5;
    for (int64_t i = 0; i < classes * length; i++) weights.values[i] = 0, w.values[i] /= (float)length;
    for (int64_t n = 0; n < count; n++) {
        const float *row = x.values + (chosen.values[n] = draw(0, rows - 1)) * length;
        double total = 0, square = 0;
        targets.values[n] = draw(0, classes - 1), squares.values[n] = 1;
        for (int64_t c = 0; c < length; c++) squares.values[n] += (double)row[c] * row[c];
        for (int64_t i = 0; i < classes; i++) {
            p[i] = bias.values[i];
            for (int64_t c = 0; c < length; c++) p[i] += (double)row[c] * w.values[i * length + c];
            total += p[i] = exp(p[i]);
        }
        for (int64_t i = 0; i < classes; i++) {
            p[i] = p[i] / total - (i == targets.values[n]);
            square += p[i] * p[i];
        }
        double norm = sqrt(square * squares.values[n]), factor = norm > bound ? bound / norm : 1;
        for (int64_t i = 0; i < classes * length; i++) expected[i] += factor * p[i / length] * row[i % length];
    }
    done("head_sums", path,
         head_sums(path, x, chosen, targets, squares, w, bias, bound, count, length, classes, weights, biases, norms, losses));
    for (int64_t i = 0; i < classes * length; i++)
        compare("head", path, weights.values[i], expected[i], 2 * (double)count);
    free(x.values), free(w.values), free(bias.values), free(weights.values), free(biases.values), free(losses.values);
    free(squares.values), free(norms.values), free(chosen.values), free(targets.values), free(expected);
}

int main(void) {
    for (int32_t path = PLAIN; path <= NEON; path++) {
        int32_t lanes = kernels_lanes(path);
        if (lanes < 0) continue;
        worst = 0;
        for (int round = 0; round < 60; round++) {
            check_channel_sums(path);
            check_group_norm(path);
            check_filter_moments(path);
            if (kernels_pairs(path)) check_low_filters(path);
            if (lanes > 0) check_unit_filters(path, lanes), check_head(path);
        }
        printf("%s: lanes %d, largest relative error %.1e\n", names[path], (int)lanes, worst);
    }
    if (wrong) printf("%d numbers are wrong\n", wrong);
    return wrong != 0;
}
