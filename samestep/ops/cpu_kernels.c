/* Operators for CPUs that pass over memory as few times as they can. float32; rows are contiguous. Compiled on first
   use by cpu_library.py, called by cpu_kernels.py, whose functions say what the arguments are. No result depends on the number of threads:
   sums over rows are formed in blocks of BLOCK rows, and the blocks added up in their order. */

#include <math.h>
#ifdef _OPENMP
#include <omp.h>
#endif
#include <stdint.h>
#include <string.h>

#define BLOCK 32
#define PIECE 2048 /* elements summed up in float32 before they go into a double */
#define PARALLEL _Pragma("omp parallel num_threads(threads) if (threads > 1)")
#define SHARED _Pragma("omp for schedule(static)")
#define PARALLEL_SHARED _Pragma("omp parallel for schedule(static) num_threads(threads) if (threads > 1)")

typedef int64_t i64;

/* For the memory that the caller sets aside. */
const i64 block_rows = BLOCK, piece_elements = PIECE;

static inline i64 least(i64 a, i64 b) { return a < b ? a : b; }
static inline i64 most(i64 a, i64 b) { return a > b ? a : b; }
static inline i64 within(i64 x, i64 low, i64 high) { return least(most(x, low), high); }

/* exp(x) to 2 units in the last place, for x clamped to [-87, 88]; NaN stays. Cody and Waite's reduction, whose products
   with the first part of ln 2 are exact, and Taylor's polynomial of degree 7: off by 5e-9 at most in [-ln2/2, ln2/2]. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504f);
    float r = x - n * 0.693145752f - n * 1.42860677e-6f;
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23; /* whatever n of a NaN is, p is NaN */
    float power;
    memcpy(&power, &bits, sizeof power);
    return p * power;
}

/* tanh(x) to 2 units in the last place (Cephes, Moshier 1989): a polynomial near 0, where 1 - 2 / (exp(2x) + 1)
   cancels. */
static inline float tangent(float x) {
    float z = fabsf(x), s = x * x, far = 1.0f - 2.0f / (exponential(2.0f * z) + 1.0f);
    float p = -5.70498872745e-3f;
    p = p * s + 2.06390887954e-2f;
    p = p * s - 5.37397155531e-2f;
    p = p * s + 1.33314422036e-1f;
    p = p * s - 3.33332819422e-1f;
    return z < 0.625f ? p * s * x + x : copysignf(far, x);
}

void rms_norm(const float *x, const float *weight, float *y, float *scale, i64 rows, i64 dim, float eps, int threads) {
    PARALLEL_SHARED
    for (i64 row = 0; row < rows; row++) {
        const float *xr = x + row * dim;
        float *yr = y + row * dim, squares = 0;
#pragma omp simd reduction(+ : squares)
        for (i64 i = 0; i < dim; i++) squares += xr[i] * xr[i];
        float s = scale[row] = 1.0f / sqrtf(squares / dim + eps);
#pragma omp simd
        for (i64 i = 0; i < dim; i++) yr[i] = xr[i] * s * weight[i];
    }
}

/* What the gradient of x needs of a row, and sums += the gradients of the weight of `rows` rows, added up first. */
static void norm_products(i64 rows, const float *grad, const float *x, const float *weight, const float *scale,
                          float *sums, float *products, i64 dim) {
    if (rows == 4) {
        float p0 = 0, p1 = 0, p2 = 0, p3 = 0;
#pragma omp simd reduction(+ : p0, p1, p2, p3)
        for (i64 i = 0; i < dim; i++) {
            float t0 = grad[i] * x[i] * scale[0], t1 = grad[dim + i] * x[dim + i] * scale[1];
            float t2 = grad[2 * dim + i] * x[2 * dim + i] * scale[2], t3 = grad[3 * dim + i] * x[3 * dim + i] * scale[3];
            sums[i] += (t0 + t1) + (t2 + t3);
            p0 += t0 * weight[i], p1 += t1 * weight[i], p2 += t2 * weight[i], p3 += t3 * weight[i];
        }
        products[0] = p0, products[1] = p1, products[2] = p2, products[3] = p3;
        return;
    }
    for (i64 r = 0; r < rows; r++) {
        float p = 0;
#pragma omp simd reduction(+ : p)
        for (i64 i = 0; i < dim; i++) {
            float t = grad[r * dim + i] * x[r * dim + i] * scale[r];
            sums[i] += t;
            p += t * weight[i];
        }
        products[r] = p;
    }
}

/* sums[i]: of partial[block * stride + i] over the blocks. All threads call it. */
static void add_up(const float *partial, i64 stride, i64 blocks, float *sums, i64 dim) {
    SHARED
    for (i64 i = 0; i < dim; i++) {
        double total = 0;
        for (i64 block = 0; block < blocks; block++) total += partial[block * stride + i];
        sums[i] = (float)total;
    }
}

void rms_norm_backward(const float *grad, const float *x, const float *weight, const float *scale, float *dx,
                       float *dweight, float *partial, i64 rows, i64 dim, int threads) {
    i64 blocks = (rows + BLOCK - 1) / BLOCK;
    PARALLEL {
        SHARED
        for (i64 block = 0; block < blocks; block++) {
            i64 stop = least((block + 1) * BLOCK, rows);
            float *sums = partial + block * dim;
            memset(sums, 0, dim * sizeof(float));
            for (i64 first = block * BLOCK; first < stop; first += 4) {
                float products[4];
                i64 group = least(4, stop - first);
                norm_products(group, grad + first * dim, x + first * dim, weight, scale + first, sums, products, dim);
                for (i64 row = first; row < first + group; row++) {
                    const float *xr = x + row * dim, *gr = grad + row * dim;
                    float *dr = dx + row * dim, s = scale[row], c = products[row - first] / dim * s;
#pragma omp simd
                    for (i64 i = 0; i < dim; i++) dr[i] = (gr[i] * weight[i] - xr[i] * c) * s;
                }
            }
        }
        add_up(partial, dim, blocks, dweight, dim);
    }
}

/* moments[row]: the mean, what is lost of it in float32, and 1 / the standard deviation. */
void layer_norm(const float *x, const float *weight, const float *bias, float *y, float *moments, i64 rows, i64 dim,
                float eps, int threads) {
    PARALLEL_SHARED
    for (i64 row = 0; row < rows; row++) {
        const float *xr = x + row * dim;
        float *yr = y + row * dim, squares = 0;
        double sum = 0;
#pragma omp simd reduction(+ : sum)
        for (i64 i = 0; i < dim; i++) sum += xr[i];
        float mean = moments[3 * row] = (float)(sum / dim), rest = moments[3 * row + 1] = (float)(sum / dim - mean);
#pragma omp simd reduction(+ : squares)
        for (i64 i = 0; i < dim; i++) {
            float centred = xr[i] - mean - rest;
            squares += centred * centred;
        }
        float s = moments[3 * row + 2] = 1.0f / sqrtf(squares / dim + eps);
#pragma omp simd
        for (i64 i = 0; i < dim; i++) yr[i] = (xr[i] - mean - rest) * s * weight[i] + bias[i];
    }
}

/* `partial` has room for two rows for each block. */
void layer_norm_backward(const float *grad, const float *x, const float *weight, const float *moments, float *dx,
                         float *dweight, float *dbias, float *partial, i64 rows, i64 dim, int threads) {
    i64 blocks = (rows + BLOCK - 1) / BLOCK;
    PARALLEL {
        SHARED
        for (i64 block = 0; block < blocks; block++) {
            float *weights = partial + 2 * block * dim, *biases = weights + dim;
            memset(weights, 0, 2 * dim * sizeof(float));
            for (i64 row = block * BLOCK; row < least((block + 1) * BLOCK, rows); row++) {
                const float *xr = x + row * dim, *gr = grad + row * dim;
                const float mean = moments[3 * row], rest = moments[3 * row + 1], s = moments[3 * row + 2];
                float *dr = dx + row * dim, sum = 0, product = 0;
#pragma omp simd reduction(+ : sum, product)
                for (i64 i = 0; i < dim; i++) {
                    float unit = (xr[i] - mean - rest) * s;
                    weights[i] += gr[i] * unit;
                    biases[i] += gr[i];
                    sum += gr[i] * weight[i];
                    product += gr[i] * weight[i] * unit;
                }
                sum /= dim, product /= dim;
#pragma omp simd
                for (i64 i = 0; i < dim; i++)
                    dr[i] = (gr[i] * weight[i] - sum - (xr[i] - mean - rest) * s * product) * s;
            }
        }
        add_up(partial, 2 * dim, blocks, dweight, dim);
        add_up(partial + dim, 2 * dim, blocks, dbias, dim);
    }
}

void swiglu(const float *gate, const float *up, float *y, i64 count, float limit, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads) if (threads > 1)
    for (i64 i = 0; i < count; i++) {
        float g = gate[i] > limit ? limit : gate[i], u = up[i] > limit ? limit : up[i];
        u = u < -limit ? -limit : u;
        y[i] = g / (1.0f + exponential(-g)) * u;
    }
}

void swiglu_backward(const float *grad, const float *gate, const float *up, float *dgate, float *dup, i64 count,
                     float limit, int threads) {
#pragma omp parallel for simd schedule(static) num_threads(threads) if (threads > 1)
    for (i64 i = 0; i < count; i++) {
        float g = gate[i] > limit ? limit : gate[i], u = up[i] > limit ? limit : up[i];
        u = u < -limit ? -limit : u;
        float divisor = 1.0f + exponential(-g), s = 1.0f / divisor;
        float dg = grad[i] * u * s * (1.0f + g * (1.0f - s)), du = g / divisor * grad[i];
        dgate[i] = gate[i] > limit ? 0.0f : dg;
        dup[i] = (up[i] > limit) | (up[i] < -limit) ? 0.0f : du;
    }
}

/* How many tokens have a position that is not in the tables; those get no result. */
i64 rope(const float *x, const float *cosines, const float *sines, const i64 *ids, float *y, i64 positions, i64 tokens,
         i64 heads, i64 dim, i64 token_stride, i64 head_stride, float direction, int threads) {
    i64 half = dim / 2, missing = 0;
#pragma omp parallel for schedule(static) reduction(+ : missing) num_threads(threads) if (threads > 1)
    for (i64 token = 0; token < tokens; token++) {
        if (ids[token] < 0 || ids[token] >= positions) {
            missing++;
            continue;
        }
        const float *c = cosines + ids[token] * half, *s = sines + ids[token] * half;
        for (i64 head = 0; head < heads; head++) {
            const float *xr = x + token * token_stride + head * head_stride;
            float *yr = y + (token * heads + head) * dim;
#pragma omp simd
            for (i64 i = 0; i < half; i++) {
                float turn = s[i] * direction, first = xr[i], second = xr[i + half]; /* y may be x */
                yr[i] = first * c[i] - second * turn;
                yr[i + half] = second * c[i] + first * turn;
            }
        }
    }
    return missing;
}

/* The number of bfloat16 next to x, of two the even one. */
static inline float bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000;
    float y;
    memcpy(&y, &bits, sizeof y);
    return x == x ? y : x;
}

/* Logits are overwritten: by the gradient of the loss where it is wanted, rounded to bfloat16 if `rounds`. softcap 0:
   none. */
void token_losses(float *logits, const i64 *labels, const float *weights, float *cross_entropy, float *logsumexp,
                  i64 rows, i64 vocabulary, float z_loss_weight, float smoothing, float softcap, int want_gradient,
                  int rounds, int threads) {
    PARALLEL_SHARED
    for (i64 row = 0; row < rows; row++) {
        float *l = logits + row * vocabulary, largest = -INFINITY;
        if (softcap) {
#pragma omp simd
            for (i64 i = 0; i < vocabulary; i++) l[i] = softcap * tangent(l[i] / softcap);
        }
#pragma omp simd reduction(max : largest)
        for (i64 i = 0; i < vocabulary; i++) largest = l[i] > largest ? l[i] : largest;
        double exponentials = 0, sum = 0;
        for (i64 start = 0; start < vocabulary; start += PIECE) {
            i64 stop = least(start + PIECE, vocabulary);
            float part = 0;
#pragma omp simd reduction(+ : part)
            for (i64 i = start; i < stop; i++) part += exponential(l[i] - largest);
            exponentials += part;
            if (smoothing) {
                part = 0;
#pragma omp simd reduction(+ : part)
                for (i64 i = start; i < stop; i++) part += l[i];
                sum += part;
            }
        }
        double log_total = largest + log(exponentials);
        double expected = (1 - (double)smoothing) * l[labels[row]] + smoothing * sum / vocabulary;
        logsumexp[row] = (float)log_total;
        cross_entropy[row] = (float)(log_total - expected);
        if (!want_gradient) continue;
        float token = weights ? weights[row] : 1.0f, shift = token * smoothing / vocabulary;
        float at_label = (1 - smoothing) * token;
        float factor = (float)((1 + 2 * (double)z_loss_weight * log_total) * token / exponentials);
        if (softcap) {
            float t = l[labels[row]] / softcap;
            at_label *= 1.0f - t * t;
#pragma omp simd
            for (i64 i = 0; i < vocabulary; i++) {
                float t = l[i] / softcap;
                l[i] = (exponential(l[i] - largest) * factor - shift) * (1.0f - t * t);
            }
        } else {
#pragma omp simd
            for (i64 i = 0; i < vocabulary; i++) l[i] = exponential(l[i] - largest) * factor - shift;
        }
        l[labels[row]] -= at_label;
        if (rounds) {
#pragma omp simd
            for (i64 i = 0; i < vocabulary; i++) l[i] = bfloat16(l[i]);
        }
    }
}

static double sum_of_squares(const float *x, i64 count) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (i64 i = 0; i < count; i++) sum += (double)x[i] * x[i];
    return sum;
}

/* totals[t]: the sum of squares of counts[t] numbers at x[t], in double. `squares` holds a number for each PIECE. */
void sums_of_squares(const float *const *x, const i64 *counts, i64 tensors, double *squares, double *totals,
                     int threads) {
    PARALLEL
    for (i64 t = 0, first = 0; t < tensors; t++) {
        i64 pieces = (counts[t] + PIECE - 1) / PIECE;
        _Pragma("omp for schedule(static) nowait")
        for (i64 piece = 0; piece < pieces; piece++) {
            i64 start = piece * PIECE;
            squares[first + piece] = sum_of_squares(x[t] + start, least(PIECE, counts[t] - start));
        }
        first += pieces;
    }
    for (i64 t = 0; t < tensors; t++) {
        totals[t] = 0;
        for (i64 piece = 0; piece < (counts[t] + PIECE - 1) / PIECE; piece++) totals[t] += *squares++;
    }
}

/* ---- attention

   Causal softmax attention of one sequence after another, in parts of KEYS keys and TILE queries, whose scores lie in a
   thread's scratch memory. Sums over keys are rescaled when a larger score turns up (Milakov and Gimelshein 2018).
   Products below a diagonal skip what is above it, in steps of ROWS and LANES.
*/

#define KEYS 512
#define TILE 48
#define DEPTH 128
/* The sums of ROWS rows and two vectors of columns fill three quarters of the registers. */
#ifdef __AVX512F__
#define LANES 16
#define ROWS 12
#else
#define LANES 8
#define ROWS 6
#endif
#define COLUMNS (2 * LANES)
#define STRIDE (KEYS + LANES)
#ifdef __clang__
#define UNROLLED
#else
#define UNROLLED _Pragma("GCC unroll 12") /* or else GCC keeps the sums in memory as well */
#endif

typedef float vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float octet __attribute__((vector_size(32), aligned(4), may_alias));

/* Columns of the vectors that a column lies in: loops over those have no tail. */
static inline i64 down(i64 from) { return from / LANES * LANES; }
static inline i64 up(i64 to) { return (to + LANES - 1) / LANES * LANES; }

/* c[m][n] (+)= sum over k of a[m * am + k * ak] * b[k][n], with `vectors` vectors of columns. */
#define BLOCK_OF(name, vector)                                                                                         \
    static inline __attribute__((always_inline)) void name(const int rows, const int vectors, i64 depth,               \
                                                            const float *a, i64 am, i64 ak, const float *b, i64 bk,    \
                                                            float *c, i64 cm, int add) {                               \
        const int lanes = sizeof(vector) / sizeof(float);                                                              \
        vector sums[ROWS][2];                                                                                          \
        UNROLLED                                                                                                       \
        for (int m = 0; m < rows; m++)                                                                                 \
            UNROLLED                                                                                                   \
            for (int n = 0; n < vectors; n++) sums[m][n] = (vector){0};                                                \
        for (i64 k = 0; k < depth; k++) {                                                                              \
            vector right[2];                                                                                           \
            UNROLLED                                                                                                   \
            for (int n = 0; n < vectors; n++) right[n] = *(const vector *)(b + k * bk + lanes * n);                    \
            UNROLLED                                                                                                   \
            for (int m = 0; m < rows; m++) {                                                                           \
                float left = a[m * am + k * ak];                                                                       \
                UNROLLED                                                                                               \
                for (int n = 0; n < vectors; n++) sums[m][n] += left * right[n];                                       \
            }                                                                                                          \
        }                                                                                                              \
        UNROLLED                                                                                                       \
        for (int m = 0; m < rows; m++)                                                                                 \
            UNROLLED                                                                                                   \
            for (int n = 0; n < vectors; n++) {                                                                        \
                vector *to = (vector *)(c + m * cm + lanes * n);                                                       \
                if (add) sums[m][n] += *to;                                                                            \
                *to = sums[m][n];                                                                                      \
            }                                                                                                          \
    }
BLOCK_OF(block, vector)
BLOCK_OF(narrow_block, octet)

/* Up to ROWS rows and COLUMNS columns of a product; columns in steps of 8. Long sums are formed in parts of DEPTH. */
static void piece(i64 rows, i64 columns, i64 depth, const float *a, i64 am, i64 ak, const float *b, i64 bk, float *c,
                  i64 cm, int add) {
    for (; depth > DEPTH; depth -= DEPTH, a += DEPTH * ak, b += DEPTH * bk, add = 1)
        piece(rows, columns, DEPTH, a, am, ak, b, bk, c, cm, add);
#define CASE(R)                                                                                                        \
    case R:                                                                                                            \
        if (columns >= COLUMNS) {                                                                                      \
            block(R, 2, depth, a, am, ak, b, bk, c, cm, add);                                                          \
            break;                                                                                                     \
        }                                                                                                              \
        if (columns >= LANES) block(R, 1, depth, a, am, ak, b, bk, c, cm, add);                                        \
        if (columns > down(columns))                                                                                   \
            narrow_block(R, 1, depth, a, am, ak, b + down(columns), bk, c + down(columns), cm, add);                   \
        break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#if ROWS > 6
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
#endif
    }
#undef CASE
}

/* A sequence: its first query and key among all tokens, and how many it has; the queries are the last of the keys. */
typedef struct {
    i64 query, queries, key, keys;
} Sequence;

typedef struct {
    const float *data;
    i64 token, head; /* strides */
} Heads;

static inline const float *at(Heads x, i64 token, i64 head) { return x.data + token * x.token + head * x.head; }

/* Some queries of a sequence and the keys `first` to `stop` of it. Query i is the key of number offset + i. */
typedef struct {
    i64 queries, first, stop, offset, window;
} Part;

static inline Part part_of(Sequence s, i64 query, i64 key, i64 window) {
    Part p = {.queries = least(TILE, s.queries - query), .offset = s.keys - s.queries + query, .window = window};
    p.first = most(key, p.offset - window + 1);
    p.stop = least(least(key + KEYS, s.keys), p.offset + p.queries);
    return p;
}
/* The keys that a query sees, counted from the first one. */
static inline i64 seen_from(Part p, i64 i) { return within(p.offset + i - p.window + 1, p.first, p.stop) - p.first; }
static inline i64 seen_to(Part p, i64 i) { return within(p.offset + i + 1, p.first, p.stop) - p.first; }

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t places __attribute__((vector_size(32)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif

/* Eight rows of eight: neighbours change places, then pairs, then halves. */
static inline void transpose_octets(const float *from, i64 from_row, float *to, i64 to_row) {
    octet rows[8], pairs[8], fours[8];
    for (int i = 0; i < 8; i++) rows[i] = *(const octet *)(from + i * from_row);
    for (int i = 0; i < 8; i += 2) {
        pairs[i] = SHUFFLE(rows[i], rows[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        pairs[i + 1] = SHUFFLE(rows[i], rows[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += i % 2 ? 3 : 1) {
        fours[i] = SHUFFLE(pairs[i], pairs[i + 2], 0, 1, 8, 9, 4, 5, 12, 13);
        fours[i + 2] = SHUFFLE(pairs[i], pairs[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    for (int i = 0; i < 4; i++) {
        *(octet *)(to + i * to_row) = SHUFFLE(fours[i], fours[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        *(octet *)(to + (i + 4) * to_row) = SHUFFLE(fours[i], fours[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

/* Rows that are read soon. A processor does not see them coming: those of other heads lie between them. */
static inline void fetch(const float *x, i64 stride, i64 rows, i64 dim) {
    for (i64 row = 0; row < rows; row++)
        for (i64 d = 0; d < dim; d += 16) __builtin_prefetch(x + row * stride + d);
}

/* to[d][key] = from[key][d], followed by zeros. */
static void transpose(const float *from, i64 token, i64 keys, i64 dim, float *to) {
    i64 whole = keys / 8 * 8;
    for (i64 key = 0; key < whole; key += 8) {
        fetch(from + (key + 16) * token, token, within(keys - key - 16, 0, 8), dim);
        for (i64 d = 0; d < dim; d += 8) transpose_octets(from + key * token + d, token, to + d * STRIDE + key, STRIDE);
    }
    for (i64 d = 0; d < dim; d++) {
        for (i64 key = whole; key < keys; key++) to[d * STRIDE + key] = from[key * token + d];
        memset(to + d * STRIDE + keys, 0, LANES * sizeof(float));
    }
}

/* scores[i][key] = a_i . b_key where a query of the same block of rows sees the key. b is transposed. */
static void scores_of(Part p, Heads a, i64 token, i64 head, const float *b, i64 dim, float *scores) {
    for (i64 n = 0; n < p.stop - p.first; n += COLUMNS) /* outside: these columns of b stay in the nearest cache */
        for (i64 i = 0; i < p.queries; i += ROWS) {
            i64 rows = least(ROWS, p.queries - i), columns = up(seen_to(p, i + rows - 1)) - n;
            if (columns > 0)
                piece(rows, columns, dim, at(a, token + i, head), a.token, 1, b + n, STRIDE,
                      scores + i * STRIDE + n, STRIDE, 0);
        }
}

/* out_i = or += sum over keys of weights[i][key] * b_key; weights are 0 where a query does not see a key. */
static void weighted(Part p, const float *weights, const float *b, i64 b_token, i64 dim, float *out, i64 out_token) {
    int add = p.first > most(p.offset - p.window + 1, 0); /* earlier keys were seen */
    for (i64 n = 0; n < dim; n += COLUMNS)
        for (i64 i = 0; i < p.queries; i += ROWS) {
            i64 rows = least(ROWS, p.queries - i), from = seen_from(p, i), depth = seen_to(p, i + rows - 1) - from;
            piece(rows, dim - n, depth, weights + i * STRIDE + from, STRIDE, 1, b + from * b_token + n, b_token,
                  out + i * out_token + n, out_token, add);
        }
}

/* out_key += sum over queries of weights[i][key] * b_i. */
static void weighted_back(Part p, const float *weights, Heads b, i64 token, i64 head, i64 dim, float *out,
                          i64 out_token) {
    i64 keys = p.stop - p.first;
    for (i64 key = 0; key < keys; key += ROWS) {
        i64 rows = least(ROWS, keys - key), same = key + p.first - p.offset; /* the query that is this key */
        i64 from = within(same, 0, p.queries), to = within(same + rows - 1 + p.window, from, p.queries);
        for (i64 n = 0; n < dim; n += COLUMNS)
            piece(rows, dim - n, to - from, weights + from * STRIDE + key, 1, STRIDE,
                  at(b, token + from, head) + n, b.token, out + key * out_token + n, out_token, 1);
    }
}

/* Floats of scratch memory of a thread: transposed keys and values, scores and their gradients. */
i64 attention_scratch(i64 dim) { return STRIDE * 2 * (dim + TILE); }

static void clear(float *x, i64 rows, i64 stride, i64 dim) {
    for (i64 row = 0; row < rows; row++) memset(x + row * stride, 0, dim * sizeof(float));
}

static inline int thread_number(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

/* Zeros in the columns of vectors of a row beside those from `from` to `to`, as far as products of ROWS queries or keys
   reach; in all of the row where there are none. */
static inline void blank(float *row, i64 from, i64 to, i64 stop) {
    if (from >= to) {
        memset(row, 0, up(stop) * sizeof(float));
        return;
    }
    i64 before = most(down(from) - COLUMNS, 0), after = least(up(to) + COLUMNS, up(stop));
    memset(row + before, 0, (down(from) - before) * sizeof(float));
    memset(row + up(to), 0, (after - up(to)) * sizeof(float));
}

/* A row of scores becomes weights relative to the largest score so far: maximum[0], while their sum so far is
   maximum[1]. Returns what earlier weights have to be multiplied by. Scores are scaled after the difference is taken,
   or else the weight of the largest one would be 1 only as far as its score has digits after the point. */
static float softmax(float *row, int from, int to, i64 stop, float scale, float *maximum) {
    float largest = maximum[0], sum = 0;
#pragma omp simd reduction(max : largest)
    for (int key = down(from); key < (int)up(to); key++) {
        float score = key >= from && key < to ? row[key] : -INFINITY;
        largest = score > largest ? score : largest;
    }
#pragma omp simd reduction(+ : sum)
    for (int key = down(from); key < (int)up(to); key++) {
        float weight = exponential((row[key] - largest) * scale);
        sum += row[key] = key >= from && key < to ? weight : 0.0f;
    }
    blank(row, from, to, stop);
    float factor = maximum[1] ? exponential((maximum[0] - largest) * scale) : 1.0f;
    maximum[0] = largest;
    maximum[1] = maximum[1] * factor + sum;
    return factor;
}

/* How many heads of a sequence a thread takes at once: all if that is little work, since heads lie side by side and
   threads that write to neighbouring lines of a cache wait for each other. */
static i64 heads_at_once(const Sequence *sequences, i64 count, i64 heads, int threads) {
    if (count < 4 * threads) return 1;
    for (i64 i = 0; i < count; i++)
        if (sequences[i].keys > 256) return 1;
    return heads;
}

/* maxima[token][head]: the largest score before it is scaled, and the sum of weights relative to it. */
void attention(const float *q, const float *k, const float *v, float *out, float *maxima, const i64 *strides,
               const Sequence *sequences, i64 count, i64 heads, i64 key_heads, i64 dim, i64 value_dim, i64 window,
               float scale, float *scratch, i64 scratch_size, int threads) {
    Heads Q = {q, strides[0], strides[1]}, K = {k, strides[2], strides[3]}, V = {v, strides[4], strides[5]};
    i64 row = heads * value_dim;
    i64 together = heads_at_once(sequences, count, heads, threads);
#pragma omp parallel for schedule(dynamic, together) num_threads(threads) if (threads > 1)
    for (i64 task = 0; task < count * heads; task++) {
        Sequence s = sequences[task / heads];
        i64 head = task % heads, key_head = head / (heads / key_heads);
        float *keys = scratch + thread_number() * scratch_size, *scores = keys + STRIDE * dim;
        float *o = out + s.query * row + head * value_dim, *m = maxima + (s.query * heads + head) * 2;
        for (i64 i = 0; i < s.queries; i++) m[i * heads * 2] = -INFINITY, m[i * heads * 2 + 1] = 0;
        for (i64 key = 0; key < s.keys; key += KEYS)
            for (i64 query = 0; query < s.queries; query += TILE) {
                Part p = part_of(s, query, key, window);
                if (query == 0) {
                    i64 count = least(KEYS, s.keys - key);
                    fetch(at(V, s.key + key, key_head), V.token, count, value_dim);
                    fetch(at(Q, s.query, head), Q.token, least(TILE, s.queries), dim);
                    transpose(at(K, s.key + key, key_head), K.token, count, dim, keys);
                }
                if (p.first >= p.stop) continue;
                fetch(at(Q, s.query + query + TILE, head), Q.token, least(TILE, s.queries - query - TILE), dim);
                scores_of(p, Q, s.query + query, head, keys + p.first - key, dim, scores);
                for (i64 i = 0; i < p.queries; i++) {
                    float *oi = o + (query + i) * row, *mi = m + (query + i) * heads * 2;
                    i64 from = seen_from(p, i), to = seen_to(p, i);
                    if (from >= to) {
                        blank(scores + i * STRIDE, from, to, p.stop - p.first);
                        continue;
                    }
                    float factor = softmax(scores + i * STRIDE, from, to, p.stop - p.first, scale, mi);
                    if (factor != 1)
                        for (i64 d = 0; d < value_dim; d++) oi[d] *= factor;
                }
                weighted(p, scores, at(V, s.key + p.first, key_head), V.token, value_dim, o + query * row, row);
            }
        for (i64 i = 0; i < s.queries; i++) {
            float sum = m[i * heads * 2 + 1];
            for (i64 d = 0; d < value_dim; d++) o[i * row + d] /= sum;
        }
    }
}

/* Contiguous: out, grad, dq, dk, dv. */
void attention_backward(const float *q, const float *k, const float *v, const float *out, const float *maxima,
                        const float *grad, float *dq, float *dk, float *dv, const i64 *strides,
                        const Sequence *sequences, i64 count, i64 heads, i64 key_heads, i64 dim, i64 value_dim,
                        i64 window, float scale, float *scratch, i64 scratch_size, int threads) {
    Heads Q = {q, strides[0], strides[1]}, K = {k, strides[2], strides[3]}, V = {v, strides[4], strides[5]};
    Heads G = {grad, heads * value_dim, value_dim};
    i64 group = heads / key_heads;
    i64 together = heads_at_once(sequences, count, key_heads, threads);
#pragma omp parallel for schedule(dynamic, together) num_threads(threads) if (threads > 1)
    for (i64 task = 0; task < count * key_heads; task++) {
        Sequence s = sequences[task / key_heads];
        i64 key_head = task % key_heads;
        float *keys = scratch + thread_number() * scratch_size, *values = keys + STRIDE * dim;
        float *weights = values + STRIDE * value_dim, *slopes = weights + STRIDE * TILE;
        clear(dk + (s.key * key_heads + key_head) * dim, s.keys, key_heads * dim, dim);
        clear(dv + (s.key * key_heads + key_head) * value_dim, s.keys, key_heads * value_dim, value_dim);
        for (i64 key = 0; key < s.keys; key += KEYS) {
            transpose(at(K, s.key + key, key_head), K.token, least(KEYS, s.keys - key), dim, keys);
            transpose(at(V, s.key + key, key_head), V.token, least(KEYS, s.keys - key), value_dim, values);
            for (i64 head = key_head * group; head < (key_head + 1) * group; head++)
                for (i64 query = 0; query < s.queries; query += TILE) {
                    Part p = part_of(s, query, key, window);
                    if (p.first >= p.stop) continue;
                    int whole = p.first == most(p.offset - window + 1, 0) && p.stop == p.offset + p.queries;
                    i64 token = s.query + query, next = token + TILE, coming = least(TILE, s.queries - query - TILE);
                    fetch(at(Q, next, head), Q.token, coming, dim);
                    fetch(at(G, next, head), G.token, coming, value_dim);
                    fetch(out + (next * heads + head) * value_dim, heads * value_dim, coming, value_dim);
                    scores_of(p, Q, token, head, keys + p.first - key, dim, weights);
                    scores_of(p, G, token, head, values + p.first - key, value_dim, slopes);
                    for (i64 i = 0; i < p.queries; i++) {
                        const float *o = out + ((token + i) * heads + head) * value_dim, *g = at(G, token + i, head);
                        const float *m = maxima + ((token + i) * heads + head) * 2;
                        float *w = weights + i * STRIDE, *slope = slopes + i * STRIDE, mean = 0;
                        int from = seen_from(p, i), to = seen_to(p, i);
#pragma omp simd reduction(+ : mean)
                        for (int j = down(from); j < (int)up(to); j++) {
                            float weight = exponential((w[j] - m[0]) * scale) / m[1];
                            int seen = j >= from && j < to;
                            w[j] = seen ? weight : 0.0f;
                            mean += slope[j] = seen ? weight * slope[j] : 0.0f;
                        }
                        if (!whole) { /* then the output knows of the other keys */
                            mean = 0;
#pragma omp simd reduction(+ : mean)
                            for (i64 d = 0; d < value_dim; d++) mean += o[d] * g[d];
                        }
#pragma omp simd
                        for (int j = down(from); j < (int)up(to); j++)
                            slope[j] = j >= from && j < to ? (slope[j] - w[j] * mean) * scale : 0.0f;
                        blank(w, from, to, p.stop - p.first);
                        blank(slope, from, to, p.stop - p.first);
                    }
                    weighted(p, slopes, at(K, s.key + p.first, key_head), K.token, dim,
                             dq + (token * heads + head) * dim, heads * dim);
                    weighted_back(p, slopes, Q, token, head, dim,
                                  dk + ((s.key + p.first) * key_heads + key_head) * dim, key_heads * dim);
                    weighted_back(p, weights, G, token, head, value_dim,
                                  dv + ((s.key + p.first) * key_heads + key_head) * value_dim, key_heads * value_dim);
                }
        }
    }
}
