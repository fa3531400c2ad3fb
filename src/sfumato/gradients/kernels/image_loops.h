/* The inner loops over images of one kind of number. The file that includes it sets TARGET, and NUMBER with
 * NAMED, READ and WRITE for it. */

/* Sums over positions of g and of g * (x - centre), for a block of channels. */
static TARGET void NAMED(block_sums)(const void *restrict images_g, const void *restrict images_x,
                                     const float *restrict centre, int64_t positions, int64_t stride,
                                     int64_t channels, double *restrict sums, double *restrict products) {
    const NUMBER *g = images_g, *x = images_x;
    for (int64_t c = 0; c < channels; c++) sums[c] = products[c] = 0;
    for (int64_t first = 0; first < positions; first += POSITIONS) {
        float s[CHANNELS] = {0}, p[CHANNELS] = {0};
        int64_t last = least(first + POSITIONS, positions);
        for (int64_t t = first; t < last; t++) {
            const NUMBER *gt = g + t * stride, *xt = x + t * stride;
            if (channels == CHANNELS) /* the usual case, of a length the compiler knows */
                for (int64_t c = 0; c < CHANNELS; c++)
                    s[c] += READ(gt[c]), p[c] += READ(gt[c]) * (READ(xt[c]) - centre[c]);
            else
                for (int64_t c = 0; c < channels; c++)
                    s[c] += READ(gt[c]), p[c] += READ(gt[c]) * (READ(xt[c]) - centre[c]);
        }
        for (int64_t c = 0; c < channels; c++) sums[c] += s[c], products[c] += p[c];
    }
}

/* result = a g + (b (x - centre) + c), with a, b, c and centre of each channel. */
static TARGET void NAMED(combine)(const void *restrict images_g, const void *restrict images_x,
                                  const float *restrict centre, int64_t positions, int64_t channels,
                                  const float *restrict a, const float *restrict b,
                                  const float *restrict c, void *restrict images) {
    const NUMBER *restrict g = images_g, *restrict x = images_x;
    NUMBER *restrict result = images;
    for (int64_t t = 0; t < positions; t++)
        for (int64_t i = 0; i < channels; i++) {
            int64_t k = t * channels + i;
            result[k] = WRITE(a[i] * READ(g[k]) + (b[i] * (READ(x[k]) - centre[i]) + c[i]));
        }
}

/* total += the sum of factor * values of at most 8 units, each `apart` from the one before. */
static TARGET void NAMED(add_weighted)(const void *restrict rows, const float *restrict factors, int64_t units,
                                       int64_t apart, int64_t length, double *restrict total) {
    float few[WEIGHTED] = {0};
    for (int64_t unit = 0; unit < units; unit++) {
        const NUMBER *restrict values = (const NUMBER *)rows + unit * apart;
        float factor = factors[unit];
        if (factor == 0) continue; /* what it has may not be finite */
        for (int64_t i = 0; i < length; i++) few[i] += factor * READ(values[i]);
    }
    for (int64_t i = 0; i < length; i++) total[i] += few[i];
}

#undef NUMBER
#undef NAMED
#undef READ
#undef WRITE
