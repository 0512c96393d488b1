/* The rows' part of attend.c. Included once per instruction set, with NAME defined. */

INLINE v8 NAME(load_any)(const void *base, int64_t at, int type) {
    if (type == FLOAT32) return load((const float *)base + at);
#ifdef __AVX2__ /* the compiler would move the values one by one */
    if (type == INT8)
        return (v8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)((const int8_t *)base + at))));
    return (v8)_mm256_slli_epi32(
        _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)((const uint16_t *)base + at))), 16);
#else
    if (type == INT8) {
        b8 b;
        memcpy(&b, (const int8_t *)base + at, sizeof b);
        return __builtin_convertvector(__builtin_convertvector(b, i8), v8);
    }
    h8 h;
    memcpy(&h, (const uint16_t *)base + at, sizeof h);
    return (v8)(__builtin_convertvector(h, u8) << 16);
#endif
}

INLINE v8 NAME(all)(const float *p) {
#ifdef __AVX2__
    return (v8)_mm256_broadcast_ss(p);
#else
    return splat(*p);
#endif
}

/* Scores of R rows against the 16 tokens of one page of K. */
INLINE void NAME(dot_page)(const int R, const float *q, const void *k, float *to, int dim, int type) {
    enum { stride = MAX_DIM, to_stride = SPLIT };
    EACH_ROW(SUMS)
#pragma GCC unroll 4
    for (int d = 0; d < dim; d++) {
        const float *factors = q + d;
        v8 low = NAME(load_any)(k, d * PAGE, type), high = NAME(load_any)(k, d * PAGE + 8, type);
        EACH_ROW(ADD)
    }
    if (type == INT8) {
        v8 low = load((const float *)((const int8_t *)k + dim * PAGE));
        v8 high = load((const float *)((const int8_t *)k + dim * PAGE) + 8);
        EACH_ROW(SCALE)
    }
    EACH_ROW(STORE)
}

/* 16 dims of R rows: add the values of up to 16 tokens of one page of V, weighed by their scores. */
INLINE void NAME(weigh_page)(const int R, const float *scores, const void *v, int first, int tokens, float *to, int dim,
                       int type) {
    enum { stride = SPLIT, to_stride = MAX_DIM };
    EACH_ROW(SUMS)
    EACH_ROW(LOAD)
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) {
        const float *factors = scores + t;
        v8 low = NAME(load_any)(v, t * dim + first, type), high = NAME(load_any)(v, t * dim + first + 8, type);
        EACH_ROW(ADD)
    }
    EACH_ROW(STORE)
}

/* A block of a page lies anywhere in memory, where no hardware prefetcher follows: ask for a later one in time. */
INLINE void NAME(fetch_ahead)(const attend_job *j, int32_t layer, const int64_t *table, int64_t at, int64_t length, int kv,
                        int head, int type) {
    if (at + AHEAD * PAGE >= length) return;
    const char *block = block_of(j, layer, table[at / PAGE + AHEAD], kv, head, type);
    for (int64_t i = 0; i < block_bytes(j->dim, type); i += 64) __builtin_prefetch(block + i, 0, 2);
}

/* Put the softmax of one split to those before it. The same steps whether the splits come one after the other or were
 * computed apart. */
INLINE void NAME(join)(float *total, float *top, float *weight, const float *part, float best, float sum, int dim) {
    if (sum == 0) return;
    float high = best > *top ? best : *top;
    float old = exp_one(*top - high), new = exp_one(best - high);
    volatile float kept = *weight * old; /* one product apart: of two, the compiler may fuse either with the sum */
    *weight = kept + sum * new;
    for (int d = 0; d < dim; d += 8) store(total + d, load(total + d) * splat(old));
    for (int d = 0; d < dim; d += 8) store(total + d, load(total + d) + load(part + d) * splat(new));
    *top = high;
}

/* Tokens in fixed splits of 256 from position 0: a softmax within each, merged in order. So a row's result does not
 * depend on where a chunk begins or on what else is computed with it. A unit is some rows of one sequence and all of
 * their splits, or one row and one of its splits: then the parts are merged afterwards. */
INLINE void NAME(attend_unit)(const attend_job *j, int32_t layer, int64_t unit, int head, const int type) {
    float q[MAX_ROWS * MAX_DIM], scores[MAX_ROWS * SPLIT], part[MAX_ROWS * MAX_DIM], total[MAX_ROWS * MAX_DIM];
    float top[MAX_ROWS], weight[MAX_ROWS];
    const int64_t *u = j->units + unit * 5, *table = j->tables + u[0] * j->table_width;
    const int group = j->heads / j->kv_heads, rows = (int)u[2] * group, dim = j->dim;
    const float scale = type == INT8 ? j->scale / (float)(dim & -dim) : j->scale;
    for (int r = 0; r < rows; r++) {
        int64_t from = (u[1] + r / group) * j->q_stride + (int64_t)(head * group + r % group) * dim;
        for (int d = 0; d < dim; d++) q[r * MAX_DIM + d] = load_one(j->q, from + d, j->io) * scale;
        if (type == INT8) spread(q + r * MAX_DIM, dim, dim & -dim); /* as the keys are */
        top[r] = -__builtin_inff();
        weight[r] = 0;
        memset(total + r * MAX_DIM, 0, sizeof(float) * dim);
    }
    const int64_t end = j->positions[u[1] + u[2] - 1] + 1;
    const int64_t window = j->windows[layer] ? j->windows[layer] : end;
    const int64_t reach = j->positions[u[1]] + 1 - window; /* the first token that the first row sees, or less than 0 */
    const int64_t begin = u[3] < 0 ? (reach > 0 ? reach / SPLIT * SPLIT : 0) : u[3] * SPLIT;
    const int64_t length = u[3] < 0 ? end : least(end, begin + SPLIT);
    if (u[3] >= 0 && length <= reach) { /* the row sees nothing of this split */
        for (int r = 0; r < rows; r++) {
            float *to = j->parts + (u[4] * j->heads + head * group + r) * (dim + 2);
            to[dim] = to[dim + 1] = 0;
        }
        return;
    }
    for (int64_t first = begin; first < length; first += SPLIT) {
        const int n = (int)least(length - first, SPLIT);
        for (int t = 0; t < n; t += PAGE) {
            const void *k = block_of(j, layer, table[(first + t) / PAGE], 0, head, type);
            NAME(fetch_ahead)(j, layer, table, first + t, end, 0, head, type);
            BY_FOUR(rows, r, NAME(dot_page)(R, q + r * MAX_DIM, k, scores + r * SPLIT + t, dim, type))
        }
        const int padded = (n + PAGE - 1) / PAGE * PAGE;
        float best[MAX_ROWS], sum[MAX_ROWS];
        for (int r = 0; r < rows; r++) {
            float *s = scores + r * SPLIT;
            const int64_t seen = j->positions[u[1] + r / group] + 1 - first;
            for (int t = 0; t < least(seen - window, padded); t++) s[t] = -__builtin_inff();
            for (int t = seen < 0 ? 0 : (int)(seen < padded ? seen : padded); t < padded; t++) s[t] = -__builtin_inff();
            v8 high = load(s);
            for (int t = 8; t < padded; t += 8) high = max8(high, load(s + t));
            best[r] = top8(high);
            sum[r] = 0;
            if (best[r] == -__builtin_inff()) { /* nothing of this split is visible to the row */
                memset(s, 0, sizeof(float) * padded);
                continue;
            }
            v8 lanes = splat(0);
            for (int t = 0; t < padded; t += 8) {
                v8 p = exp_negative(load(s + t) - best[r]);
                store(s + t, p);
                lanes += p;
            }
            sum[r] = sum8(lanes);
        }
        for (int r = 0; r < rows; r++) memset(part + r * MAX_DIM, 0, sizeof(float) * dim);
        for (int t = 0; t < n; t += PAGE) {
            const void *v = block_of(j, layer, table[(first + t) / PAGE], 1, head, type);
            NAME(fetch_ahead)(j, layer, table, first + t, end, 1, head, type);
            const int tokens = n - t < PAGE ? n - t : PAGE; /* what is not written yet may be anything, NaN too */
            if (type == INT8) {
                const float *scales = (const float *)((const int8_t *)v + PAGE * dim);
                for (int r = 0; r < rows; r++)
                    for (int i = 0; i < PAGE; i += 8) {
                        float *s = scores + r * SPLIT + t + i;
                        store(s, load(s) * load(scales + i));
                    }
            }
            for (int d = 0; d < dim; d += 16)
                BY_FOUR(rows, r, NAME(weigh_page)(R, scores + r * SPLIT + t, v, d, tokens, part + r * MAX_DIM + d, dim, type))
        }
        if (u[3] >= 0) {
            for (int r = 0; r < rows; r++) {
                float *to = j->parts + (u[4] * j->heads + head * group + r) * (dim + 2);
                memcpy(to, part + r * MAX_DIM, sizeof(float) * dim);
                to[dim] = best[r];
                to[dim + 1] = sum[r];
            }
            return;
        }
        for (int r = 0; r < rows; r++)
            NAME(join)(total + r * MAX_DIM, top + r, weight + r, part + r * MAX_DIM, best[r], sum[r], dim);
    }
    for (int r = 0; r < rows; r++) {
        int64_t to = ((u[1] + r / group) * j->heads + head * group + r % group) * dim;
        for (int d = 0; d < dim; d++) store_any(j->out, to + d, total[r * MAX_DIM + d] / weight[r], j->io);
    }
}

/* `unit`: one of n_units * kv_heads. */
static void NAME(attend)(const attend_job *j, int32_t layer, int64_t unit) {
    const int64_t at = unit / j->kv_heads;
    const int head = (int)(unit % j->kv_heads);
    if (j->type == FLOAT32)
        NAME(attend_unit)(j, layer, at, head, FLOAT32);
    else if (j->type == BFLOAT16)
        NAME(attend_unit)(j, layer, at, head, BFLOAT16);
    else
        NAME(attend_unit)(j, layer, at, head, INT8);
}

/* `unit`: one of n_merges * heads. */
static void NAME(merge)(const attend_job *j, int64_t unit) {
    float total[MAX_DIM] = {0}, top = -__builtin_inff(), weight = 0;
    const int64_t *m = j->merges + unit / j->heads * 3, head = unit % j->heads;
    const int dim = j->dim;
    for (int64_t slot = m[1]; slot < m[1] + m[2]; slot++) {
        const float *part = j->parts + (slot * j->heads + head) * (dim + 2);
        NAME(join)(total, &top, &weight, part, part[dim], part[dim + 1], dim);
    }
    for (int d = 0; d < dim; d++)
        store_any(j->out, (m[0] * j->heads + head) * dim + d, total[d] / weight, j->io);
}

/* ---- writing K and V: kv [rows, 2 * kv heads, dim], kv_stride elements from row to row, into (page, offset) */

/* One head of one token in 8 bits; `step` elements from value to value. Keys are spread first. */
INLINE void NAME(write_int8)(const void *from, int64_t at, int io, int8_t *to, int step, float *scale, int dim, int key) {
    float top = 0, values[MAX_DIM];
    int broken = 0;
    for (int d = 0; d < dim; d++) values[d] = load_one(from, at + d, io);
    if (key) spread(values, dim, dim & -dim);
    for (int d = 0; d < dim; d++) {
        float size = values[d] < 0 ? -values[d] : values[d];
        broken |= !(size < __builtin_inff());
        top = size > top ? size : top;
    }
    const float by = top > 0 && !broken ? 127 / top : 0;
    for (int d = 0; d < dim; d += 8) {
        i8 q = __builtin_convertvector(round_product(load(values + d), by), i8);
        for (int i = 0; i < 8; i++) to[(d + i) * step] = broken ? 1 : (int8_t)q[i];
    }
    *scale = broken ? __builtin_nanf("") : top / 127; /* what is broken must stay so */
}

static void NAME(write)(const write_job *w, int64_t first, int64_t last) {
    const int dim = w->dim, heads = w->kv_heads;
    const int64_t block = block_bytes(dim, w->type);
    for (int64_t row = first; row < last; row++) {
        char *to = (char *)w->pool + (w->page[row] * w->n_layers + w->layer) * 2 * heads * block;
        const int64_t offset = w->offset[row];
        for (int head = 0; head < 2 * heads; head++, to += block) {
            const int64_t from = row * w->kv_stride + (int64_t)head * dim;
            const int step = head < heads ? PAGE : 1;
            const int64_t at = head < heads ? offset : offset * dim;
            if (w->type == INT8)
                NAME(write_int8)(w->kv, from, w->io, (int8_t *)to + at, step, (float *)(to + PAGE * dim) + offset, dim,
                                 head < heads);
            else
                for (int d = 0; d < dim; d++)
                    store_any(to, at + d * step, load_one(w->kv, from + d, w->io), w->type);
        }
    }
}
