/* Passes over float arrays that read memory once, where torch operations read it several times.
 *
 * Plain C11, loaded by native.py. The reference are the pure functions of optim/functional.py and
 * the torch operations of statistics/second_moment.py. One call does a list of layers, with threads
 * that live as long as the call. Sums are kept in double, so the number of threads changes only
 * their last bits.
 */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

_Static_assert(sizeof(void *) == 8, "native.py passes addresses of 8 bytes");

/* One binary for every x86: the loader chooses the widest registers of the machine. */
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WIDE
#endif
#define INLINE static inline __attribute__((always_inline))

enum {
    BLOCK = 4096,     /* elements whose sums are kept in float */
    SHARED = 1 << 18, /* all threads share a layer of more elements */
    MAX_THREADS = 256,
    SUMS = 2,         /* sums of the first pass for the second, per layer and thread */
    STATS = 5,        /* statistics of GSNR scaling, per layer and thread */
    GROUP_VALUES = 12, /* at most */
};

/* ---- threads ------------------------------------------------------------------------------- */

typedef void Work(void *job, int id, int threads);
typedef struct {
    Work *work;
    void *job;
    int id;
    atomic_int *threads; /* 0 until all have started */
} Worker;

static void *start(void *argument) {
    Worker *worker = argument;
    int threads;
    while (!(threads = atomic_load(worker->threads))) sched_yield();
    worker->work(worker->job, worker->id, threads);
    return NULL;
}

static void run_threads(Work *work, void *job, int max_threads) {
    Worker workers[MAX_THREADS];
    pthread_t handles[MAX_THREADS];
    atomic_int threads = 0;
    int started = 1;
    for (; started < max_threads && started < MAX_THREADS; started++) {
        workers[started] = (Worker){work, job, started, &threads};
        if (pthread_create(&handles[started], NULL, start, &workers[started])) break;
    }
    atomic_store(&threads, started);
    work(job, 0, started);
    for (int id = 1; id < started; id++) pthread_join(handles[id], NULL);
}

typedef struct {
    int64_t from, to;
} Slice;

static Slice slice(int64_t n, int id, int threads) {
    int64_t each = (n / threads + 16) & ~(int64_t)15, from = each * id, to = from + each;
    return (Slice){from < n ? from : n, to < n ? to : n};
}

/* ---- layers: one or two passes over each, the second with the sums of the first ------------- */

typedef struct {
    float *a, *b, *c, *d, *e, *f, *g, *h;
} Layer;

typedef struct Job Job;
typedef void Pass(const Job *job, int64_t layer, int id, Slice part);
struct Job {
    float *const *arrays; /* [column of a rule][layer] */
    int columns;
    const int64_t *lengths; /* elements of each layer */
    int64_t count;
    const double *layer_values; /* two numbers for each layer */
    const double *group_values; /* the numbers that all layers share */
    double *sums;         /* [thread][layer][SUMS], zero at first */
    double *stats;        /* [thread][layer][STATS], zero at first; or NULL */
    Pass *first, *second; /* either may be NULL */
    int threads;
    atomic_llong arrived, next;
};

static Layer layer_of(const Job *job, int64_t layer) {
    float *at[8] = {0};
    for (int column = 0; column < job->columns; column++)
        at[column] = job->arrays[column * job->count + layer];
    return (Layer){at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7]};
}

static double *sums_of(const Job *job, int64_t layer, int id) {
    return job->sums + (id * job->count + layer) * SUMS;
}

static double total(const Job *job, int64_t layer, int which) {
    double sum = 0;
    for (int id = 0; id < job->threads; id++) sum += sums_of(job, layer, id)[which];
    return sum;
}

static void barrier(Job *job, int threads) {
    long long turn = atomic_fetch_add(&job->arrived, 1) / threads;
    while (atomic_load(&job->arrived) < (turn + 1) * threads) sched_yield();
}

static void run_layers(void *argument, int id, int threads) {
    Job *job = argument;
    for (int64_t l = 0; threads > 1 && l < job->count; l++) {
        if (job->lengths[l] <= SHARED) continue;
        Slice part = slice(job->lengths[l], id, threads);
        if (job->first) job->first(job, l, id, part);
        if (job->first && job->second) barrier(job, threads);
        if (job->second) job->second(job, l, id, part);
    }
    for (int64_t l; (l = atomic_fetch_add(&job->next, 1)) < job->count;) {
        Slice all = {0, job->lengths[l]};
        if (threads > 1 && all.to > SHARED) continue;
        if (job->first) job->first(job, l, id, all);
        if (job->second) job->second(job, l, id, all);
    }
}

/* ---- squared norms: column gradient ---------------------------------------------------------- */

/* |gradient|^2 in double, in which the square of 1e-23 is not 0 */
WIDE static void squares(const Job *job, int64_t layer, int id, Slice part) {
    const float *gradient = layer_of(job, layer).a;
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = part.from; i < part.to; i++) sum += (double)gradient[i] * gradient[i];
    sums_of(job, layer, id)[0] += sum;
}

/* ---- second moment of the micro-batch gradients: columns gradient, sum, m2 ------------------- */

enum { MEAN_OF, SHARE, FIRST, ADDS };

INLINE void add_deviations(const Layer *l, Slice part, float mean_of, float share,
                           const int first, const int adds) {
    const float *gradient = l->a;
    float *sum = l->b, *m2 = l->c;
#pragma omp simd
    for (int64_t i = part.from; i < part.to; i++) {
        float deviation = gradient[i] - mean_of * sum[i];
        float square = share * deviation * deviation;
        m2[i] = first ? square : m2[i] + square;
        if (adds) sum[i] += gradient[i];
    }
}

/* m2 += share (gradient - mean_of sum)^2, or = if first;  then sum += gradient, if adds */
WIDE static void welford(const Job *job, int64_t layer, int id, Slice part) {
    (void)id;
    Layer l = layer_of(job, layer);
    const double *values = job->group_values;
    float of = (float)values[MEAN_OF], share = (float)values[SHARE];
    values[FIRST] ? values[ADDS] ? add_deviations(&l, part, of, share, 1, 1)
                                 : add_deviations(&l, part, of, share, 1, 0)
    : values[ADDS] ? add_deviations(&l, part, of, share, 0, 1)
                   : add_deviations(&l, part, of, share, 0, 0);
}

/* ---- gsnr: gradient times r, or times the average of r -------------------------------------- */

/* columns: sum, m2, gradient, average (NULL for none); layer_values: 1 / (1 - beta3^t) */
enum { WEIGHT, LIMIT, GAMMA, R_MAX, BETA3, GSNR_VALUES };

/* in this order no square overflows or underflows before m2 does */
INLINE float ratio(float s, float m2, float share) { return s / m2 * s * share; }

WIDE static void ratio_sums(const Job *job, int64_t layer, int id, Slice part) {
    Layer l = layer_of(job, layer);
    const float *s = l.a, *m2 = l.b;
    const double *values = job->group_values;
    const float share = (float)(1 / values[WEIGHT]), limit = (float)values[LIMIT];
    double sum = 0, live = 0;
    for (int64_t from = part.from, to; from < part.to; from = to) {
        to = from + BLOCK < part.to ? from + BLOCK : part.to;
        float q_sum = 0, q_live = 0;
#pragma omp simd reduction(+ : q_sum, q_live)
        for (int64_t i = from; i < to; i++) {
            float q = ratio(s[i], m2[i], share);
            q_sum += q < limit ? q : 0;
            q_live += q < limit ? 1 : 0;
        }
        sum += q_sum;
        live += q_live;
    }
    sums_of(job, layer, id)[0] += sum;
    sums_of(job, layer, id)[1] += live;
}

/* The base optimizer's step on the scaled gradient, as torch's fused SGD and Adam define it.
 * SGD: columns 5 theta, 6 buffer (NULL without momentum). Adam: 5 theta, 6 m, 7 v, 8 step. */
enum { NO_STEP, SGD, SGD_MOMENTUM, ADAM };
enum { STEP_LR = GSNR_VALUES, STEP_DECAY, STEP_SIGN, STEP_FIRST, STEP_SECOND, STEP_LAST, STEP_DECOUPLED };

typedef struct {
    float share, limit, scale, gamma, r_max, lerp, correction; /* r */
    float lr, decay, sign, momentum, rest; /* rest: 1 - dampening */
    float shrink, lerp1, beta2, rest2, eps, root; /* Adam; root: of 1 - beta2^t */
    int nesterov;
} Gsnr;

INLINE void gsnr_part(const Layer *l, Slice part, const Gsnr *f, double *stats,
                      const int averages, const int step) {
    const float *s = l->a, *m2 = l->b;
    float *g = l->c, *p = l->d, *theta = l->e, *m = l->f, *v = l->g;
    const Gsnr k = *f;
    for (int64_t from = part.from, to; from < part.to; from = to) {
        to = from + BLOCK < part.to ? from + BLOCK : part.to;
        float r_sum = 0, low = 0, high = 0, before = 0, after = 0;
        if (step == ADAM && k.shrink != 1) { /* apart, so that it is rounded, as torch does */
#pragma omp simd
            for (int64_t i = from; i < to; i++) theta[i] *= k.shrink;
        }
#pragma omp simd reduction(+ : r_sum, low, high, before, after)
        for (int64_t i = from; i < to; i++) {
            float q = ratio(s[i], m2[i], k.share);
            float r = k.scale * q;
            r = r > k.gamma ? r : k.gamma; /* nan: a dead element */
            r = r < k.r_max && !(q >= k.limit) ? r : k.r_max;
            if (stats) {
                r_sum += r;
                low += r <= k.gamma ? 1 : 0;
                high += r >= k.r_max ? 1 : 0;
            }
            if (averages) {
                p[i] += k.lerp * (r - p[i]);
                r = p[i] * k.correction;
            }
            float scaled = r * g[i];
            if (stats) {
                before += g[i] * g[i];
                after += scaled * scaled;
            }
            g[i] = scaled;
            if (step == NO_STEP) continue;
            float d = k.sign < 0 ? -scaled : scaled;
            if (step == ADAM) {
                d += k.decay * theta[i];
                m[i] += k.lerp1 * (d - m[i]);
                float added = k.rest2 * d * d, kept = k.beta2 * v[i];
                v[i] = kept + added;
                theta[i] -= k.lr * m[i] / (sqrtf(v[i]) / k.root + k.eps);
            } else {
                d += k.decay * theta[i];
                if (step == SGD_MOMENTUM) {
                    float added = k.rest * d, kept = k.momentum * m[i];
                    m[i] = kept + added;
                    d = k.nesterov ? d + k.momentum * m[i] : m[i];
                }
                theta[i] -= k.lr * d;
            }
        }
        if (stats) {
            stats[0] += r_sum;
            stats[1] += low;
            stats[2] += high;
            stats[3] += before;
            stats[4] += after;
        }
    }
}

static Gsnr gsnr_of(const Job *job, int64_t layer) {
    const double *values = job->group_values;
    double live = total(job, layer, 1), scale = (live > 1 ? live : 1) / total(job, layer, 0);
    return (Gsnr){.share = (float)(1 / values[WEIGHT]), .limit = (float)values[LIMIT],
                  .scale = (float)scale, .gamma = (float)values[GAMMA],
                  .r_max = (float)values[R_MAX], .lerp = (float)(1 - values[BETA3]),
                  .correction = (float)job->layer_values[2 * layer]};
}

/* Scales a layer, and steps it; step is a constant, so each kind is compiled by itself. */
INLINE void scale(const Job *job, int64_t layer, int id, Slice part, const Gsnr *f, const int step) {
    const Layer l = layer_of(job, layer);
    double *stats = job->stats ? job->stats + (id * job->count + layer) * STATS : 0;
    l.d ? stats ? gsnr_part(&l, part, f, stats, 1, step) : gsnr_part(&l, part, f, 0, 1, step)
        : stats ? gsnr_part(&l, part, f, stats, 0, step) : gsnr_part(&l, part, f, 0, 0, step);
}

WIDE static void gsnr_pass(const Job *job, int64_t layer, int id, Slice part) {
    Gsnr f = gsnr_of(job, layer);
    scale(job, layer, id, part, &f, NO_STEP);
}

WIDE static void sgd_pass(const Job *job, int64_t layer, int id, Slice part) {
    const double *values = job->group_values;
    Gsnr f = gsnr_of(job, layer);
    f.lr = (float)values[STEP_LR];
    f.decay = (float)values[STEP_DECAY];
    f.sign = (float)values[STEP_SIGN];
    f.momentum = (float)values[STEP_FIRST];
    f.rest = (float)(1 - values[STEP_SECOND]);
    f.nesterov = (int)values[STEP_LAST];
    layer_of(job, layer).f ? scale(job, layer, id, part, &f, SGD_MOMENTUM)
                           : scale(job, layer, id, part, &f, SGD);
}

/* step is the number of steps before this one, in a tensor that the caller counts up after it */
WIDE static void adam_pass(const Job *job, int64_t layer, int id, Slice part) {
    const double *values = job->group_values, beta1 = values[STEP_FIRST],
                 beta2 = values[STEP_SECOND], decay = values[STEP_DECAY], lr = values[STEP_LR],
                 steps = *layer_of(job, layer).h + 1.0;
    const int decoupled = (int)values[STEP_DECOUPLED];
    Gsnr f = gsnr_of(job, layer);
    f.lr = (float)(lr / (1 - pow(beta1, steps)));
    f.decay = decoupled ? 0 : (float)decay;
    f.shrink = decoupled ? (float)(1 - lr * decay) : 1;
    f.sign = (float)values[STEP_SIGN];
    f.lerp1 = (float)(1 - beta1);
    f.beta2 = (float)beta2;
    f.rest2 = (float)(1 - beta2);
    f.eps = (float)values[STEP_LAST];
    f.root = (float)sqrt(1 - pow(beta2, steps));
    scale(job, layer, id, part, &f, ADAM);
}

/* ---- LARS: columns theta, gradient, buffer ---------------------------------------------------- */

enum { LR, DECAY, SIGN, ADAPTS, MOMENTUM, TRUST, NESTEROV };      /* LARS */
enum { BETA1 = MOMENTUM, BETA2, EPS }; /* LAMB, after the same four */

WIDE static void lars_norms(const Job *job, int64_t layer, int id, Slice part) {
    const Layer l = layer_of(job, layer);
    const float *theta = l.a, *g = l.b;
    double *sums = sums_of(job, layer, id), ww = 0, gg = 0;
#pragma omp simd reduction(+ : ww, gg)
    for (int64_t i = part.from; i < part.to; i++) {
        ww += (double)theta[i] * theta[i];
        gg += (double)g[i] * g[i]; /* in float the square of 1e-23 is 0 */
    }
    sums[0] += ww;
    sums[1] += gg;
}

WIDE static void lars_step(const Job *job, int64_t layer, int id, Slice part) {
    (void)id;
    const Layer l = layer_of(job, layer);
    float *theta = l.a, *g = l.b, *buffer = l.c;
    const double *values = job->group_values;
    double weight = sqrt(total(job, layer, 0)), gradient = sqrt(total(job, layer, 1)), rate = 1;
    if (values[ADAPTS] && weight > 0 && gradient > 0)
        rate = values[TRUST] * weight / (gradient + values[DECAY] * weight);
    const float lr = (float)(values[LR] * rate), sign = (float)values[SIGN],
                decay = (float)values[DECAY], momentum = (float)values[MOMENTUM];
    const int nesterov = (int)values[NESTEROV];
#pragma omp simd
    for (int64_t i = part.from; i < part.to; i++) {
        float update = lr * (sign * g[i] + decay * theta[i]);
        buffer[i] = momentum * buffer[i] + update;
        theta[i] -= nesterov ? momentum * buffer[i] + update : buffer[i];
    }
}

/* ---- LAMB: columns theta, gradient, m, v; layer_values: 1 - beta1^t and 1 - beta2^t ----------- */

INLINE float direction(float theta, float m, float v, float c1, float c2, float eps, float decay) {
    return c1 * m / (sqrtf(c2 * v) + eps) + decay * theta;
}

WIDE static void lamb_moments(const Job *job, int64_t layer, int id, Slice part) {
    const Layer l = layer_of(job, layer);
    const float *theta = l.a, *g = l.b;
    float *m = l.c, *v = l.d;
    const double *values = job->group_values;
    const float b1 = (float)(1 - values[BETA1]), b2 = (float)(1 - values[BETA2]),
                sign = (float)values[SIGN], eps = (float)values[EPS], decay = (float)values[DECAY],
                c1 = (float)(1 / job->layer_values[2 * layer]),
                c2 = (float)(1 / job->layer_values[2 * layer + 1]);
    double *sums = sums_of(job, layer, id), ww = 0, uu = 0;
#pragma omp simd reduction(+ : ww, uu)
    for (int64_t i = part.from; i < part.to; i++) {
        m[i] += b1 * (sign * g[i] - m[i]);
        v[i] += b2 * (g[i] * g[i] - v[i]);
        float u = direction(theta[i], m[i], v[i], c1, c2, eps, decay);
        ww += (double)theta[i] * theta[i];
        uu += (double)u * u;
    }
    sums[0] += ww;
    sums[1] += uu;
}

WIDE static void lamb_step(const Job *job, int64_t layer, int id, Slice part) {
    (void)id;
    const Layer l = layer_of(job, layer);
    const float *m = l.c, *v = l.d;
    float *theta = l.a;
    const double *values = job->group_values;
    double weight = sqrt(total(job, layer, 0)), update = sqrt(total(job, layer, 1)), rate = 1;
    if (values[ADAPTS] && weight > 0 && update > 0) rate = weight / update;
    const float lr = (float)(values[LR] * rate), eps = (float)values[EPS],
                decay = (float)values[DECAY], c1 = (float)(1 / job->layer_values[2 * layer]),
                c2 = (float)(1 / job->layer_values[2 * layer + 1]);
#pragma omp simd
    for (int64_t i = part.from; i < part.to; i++)
        theta[i] -= lr * direction(theta[i], m[i], v[i], c1, c2, eps, decay);
}

/* ---- the call ------------------------------------------------------------------------------- */

static const struct {
    Pass *first, *second;
} rules[] = {
    {squares, 0},           {welford, 0},           {ratio_sums, gsnr_pass},    {ratio_sums, sgd_pass},
    {ratio_sums, adam_pass}, {lars_norms, lars_step}, {lamb_moments, lamb_step},
};

/* Applies one rule to a list of layers. passes: 1, the first, which writes the sums; 2, the second,
 * which reads them as those of thread 0; 3, both. table: the addresses of each column, then the
 * lengths; columns that it leaves out are NULL. numbers: group_values, layer_values, sums, and, if
 * watched, stats. */
void run_rule(int rule, int passes, int columns, const int64_t *table, int64_t count,
              double *numbers, int threads, int watch) {
    double *layer_values = numbers + GROUP_VALUES, *sums = layer_values + 2 * count;
    Job job = {.arrays = (float *const *)table, .columns = columns,
               .lengths = table + columns * count, .count = count, .group_values = numbers,
               .layer_values = layer_values, .sums = sums,
               .stats = watch ? sums + threads * count * SUMS : 0,
               .first = passes & 1 ? rules[rule].first : 0,
               .second = passes & 2 ? rules[rule].second : 0, .threads = threads};
    run_threads(run_layers, &job, threads);
}
