/* A softmax regression's clipped sum over a block of rows: two products in tiles, and what lies between. */

enum { ROWS = BROAD }; /* rows whose products with TALL classes are summed at once */

/* out[r, i] = x[r] . w[i] for a few rows and classes; `length` numbers each. */
TILE dots(const float *const *x, const float *w, int64_t length, float *out, const int tall, const int rows) {
    lanes sums[ROWS][TALL];
    int64_t c = 0;
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < tall; i++) sums[r][i] = (lanes){0};
    for (; c + LANES <= length; c += LANES) {
        lanes values[ROWS];
        for (int r = 0; r < rows; r++) values[r] = *values_at(x[r] + c);
        for (int i = 0; i < tall; i++) {
            lanes weights = *values_at(w + i * length + c);
            for (int r = 0; r < rows; r++) sums[r][i] += values[r] * weights;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < tall; i++) {
            float total = 0;
            for (int l = 0; l < LANES; l++) total += sums[r][i][l];
            for (int64_t l = c; l < length; l++) total += x[r][l] * w[i * length + l];
            out[r * CLASSES + i] = total;
        }
}

/* result[i, c] += sum over rows of f[r, i] * x[r, c], for `tall` classes and `broad` vectors from c on. */
TILE outer(const float *const *x, int64_t c, const float *f, int64_t rows, int64_t length, float *result,
           const int tall, const int broad) {
    lanes sums[TALL][BROAD];
    for (int i = 0; i < tall; i++)
        for (int j = 0; j < broad; j++) sums[i][j] = (lanes){0};
    for (int64_t r = 0; r < rows; r++) {
        lanes values[BROAD];
        for (int j = 0; j < broad; j++) values[j] = *values_at(x[r] + c + j * LANES);
        for (int i = 0; i < tall; i++)
            for (int j = 0; j < broad; j++) sums[i][j] += values[j] * f[r * CLASSES + i];
    }
    for (int i = 0; i < tall; i++)
        for (int j = 0; j < broad; j++) *vector_at(result + i * length + c + j * LANES) += sums[i][j];
}

#define DOTS(i_, r_) dots(x + r, w + i * length, length, out + r * CLASSES + i, i_, r_)
#define OUTER(i_, j_) outer(x, c, f + i, rows, length, result + i * length, i_, j_)

/* (rows, CLASSES): the products of all rows x with all w. */
static TARGET void all_dots(const float *const *x, const float *w, int64_t rows, int64_t length,
                            int64_t classes, float *out) {
    for (int64_t r = 0; r < rows; r += ROWS)
        for (int64_t i = 0; i < classes; i += TALL)
            switch (SIZE_OF_TILE(least(TALL, classes - i), least(ROWS, rows - r))) { CASES(DOTS) }
}

/* (classes, length): add the products of f[r] and x[r] over all rows. */
static TARGET void add_outer(const float *const *x, const float *f, int64_t rows, int64_t length,
                             int64_t classes, float *result) {
    int64_t broad, whole = length / LANES * LANES;
    for (int64_t c = 0; c < whole; c += broad * LANES) {
        broad = least(BROAD, (whole - c) / LANES);
        for (int64_t i = 0; i < classes; i += TALL)
            switch (SIZE_OF_TILE(least(TALL, classes - i), broad)) { CASES(OUTER) }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < classes; i++)
            for (int64_t c = whole; c < length; c++) result[i * length + c] += f[r * CLASSES + i] * x[r][c];
}

/* The logits of one row become p - y; returns the loss. */
static TARGET float residual_of(float *logits, const float *bias, int64_t classes, int64_t target) {
    float largest = -INFINITY, total = 0;
    for (int64_t i = 0; i < classes; i++) {
        logits[i] += bias[i];
        if (logits[i] > largest) largest = logits[i];
    }
    float at_target = logits[target] - largest;
    for (int64_t i = 0; i < classes; i++) total += logits[i] = expf(logits[i] - largest);
    for (int64_t i = 0; i < classes; i++) logits[i] /= total;
    logits[target] -= 1;
    return logf(total) - at_target;
}

/* Logits, norms and losses of a block's rows; its clipped sum is added to the gradients of weight and bias. */
static TARGET void add_head_block(struct head_block *block) {
    const float **x = block->x;
    float f[BLOCK * CLASSES];
    int64_t classes = block->classes, counted = 0;
    all_dots(x, block->w, block->rows, block->length, classes, f);
    for (int64_t r = 0; r < block->rows; r++) {
        float *residual = f + r * CLASSES;
        block->losses[r] = residual_of(residual, block->bias, classes, block->targets[r]);
        double square = 0;
        for (int64_t i = 0; i < classes; i++) square += (double)residual[i] * residual[i];
        double norm = block->norms[r] = sqrt(square * block->squares[r]);
        if (!isfinite(norm)) continue;
        float factor = norm > block->bound ? (float)(block->bound / norm) : 1;
        x[counted] = x[r]; /* rows that count move up */
        for (int64_t i = 0; i < classes; i++)
            block->biases[i] += f[counted * CLASSES + i] = factor * residual[i];
        counted++;
    }
    add_outer(x, f, counted, block->length, classes, block->weights);
}
