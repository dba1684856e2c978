/* The passes over memory of a mechanized step on a CPU. `step.c`, which makes a step of them, is
   compiled together with this file.

   Work is cut into chunks of the tensors. The sums of all chunks are added up in double precision
   and in one order, so that the result does not depend on the number of threads. */

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>

enum { LANES = 16, MOST_THREADS = 256 };
enum { ADAM, ADAMW, SGD, MOMENTUM, NESTEROV, LION };

/* The columns of the tables that `plan.py` fills, in their order. */
typedef struct {
    float *x, *delta, *first, *second, *counter;
    int64_t count, group;
} Tensor;

typedef struct {
    int64_t tensor, begin, count;
} Chunk;

typedef struct {
    int64_t begin, end;
} Region;

typedef struct {
    double lr, unit, sign, a, b, eps, decay, base_lr, formula;
} Group;

typedef struct {
    const Tensor *tensors;
    const Chunk *chunks;
    const Region *written; /* what the step writes to, from low to high addresses */
    const Group *groups;
    float *const *rates;
    double *packed;
    int64_t *counts;
    int64_t tensor_count, chunk_count, written_count, group_count;
    int64_t scale_at, share_at, with_x, with_u;
    double max_norm, farthest;
} Plan;

/* What the rule is given beside the tuner's numbers, which it reads and writes, and what it makes,
   in the order of `mechanic.torch.written`. */
typedef struct {
    double share, dg, dx, gg, xx, dd, uu, takes_part, lr;
} Given;

typedef struct {
    double scale, share, x_per_stored, kept;
} Made;

typedef void Rule(double *packed, const double *given, double *made);

typedef struct {
    double dg, dd, gg, dx, xx, uu;
} Sums;

/* What a step does to the tensors of a group. */
typedef struct {
    float factor, a, rest_a, b, rest_b, eps, decay, base_lr;
    float x_per_stored, x_per_proposal, stored_per_proposal, kept;
    int is_live; /* at an lr of 0 parameters and displacements stay as they are */
} Move;

typedef struct {
    float first, second;
} Biases;

typedef struct Step Step;

typedef void Work(const Step *step, int64_t chunk);

struct Step {
    const Plan *plan;
    const float *const *grads;
    Sums *partials;
    Move *moves;
    Biases *biases;
    int64_t threads;
};

typedef struct {
    const Step *step;
    Work *work;
    int64_t next;
} Queue;

static void *work_off(void *argument) {
    Queue *queue = argument;
    int64_t chunk, count = queue->step->plan->chunk_count;
    while ((chunk = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED)) < count)
        queue->work(queue->step, chunk);
    return NULL;
}

/* Work on all chunks. The threads live as long as a pass, so that there is nothing to go wrong in
   a process that forks; signals are for the threads of the program. */
static void work_on_chunks(const Step *step, Work *work) {
    Queue queue = {step, work, 0};
    pthread_t others[MOST_THREADS];
    int64_t started = 0;
    if (step->threads > 1) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        while (started + 1 < step->threads && started < MOST_THREADS
               && pthread_create(&others[started], NULL, work_off, &queue) == 0)
            ++started;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    work_off(&queue);
    while (started > 0)
        pthread_join(others[--started], NULL);
}

static double total(const float *lanes) {
    double sum = 0;
    for (int lane = 0; lane < LANES; ++lane)
        sum += lanes[lane];
    return sum;
}

static inline __attribute__((always_inline)) double inner(
    const float *restrict a, const float *restrict b, int64_t count) {
    float sums[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (int lane = 0; lane < LANES; ++lane)
            sums[lane] += a[i + lane] * b[i + lane];
    for (int lane = 0; i < count; ++i, ++lane)
        sums[lane] += a[i] * b[i];
    return total(sums);
}

static double square(const float *a, int64_t count) {
    return inner(a, a, count);
}

/* The sums of a chunk, in blocks that stay in the nearest cache. Within a block each lane adds up
   64 numbers in single precision; the blocks are added up in double precision. */
static void sum_chunk(const Step *step, int64_t place) {
    const Chunk *chunk = &step->plan->chunks[place];
    const Tensor *tensor = &step->plan->tensors[chunk->tensor];
    const float *grad = step->grads[chunk->tensor], *delta = tensor->delta + chunk->begin;
    enum { BLOCK = 64 * LANES };
    Sums sums = {0};
    for (int64_t begin = 0; begin < chunk->count; begin += BLOCK) {
        int64_t count = chunk->count - begin < BLOCK ? chunk->count - begin : BLOCK;
        const float *d = delta + begin;
        sums.dd += square(d, count);
        if (grad == NULL)
            continue;
        const float *g = grad + chunk->begin + begin;
        sums.dg += inner(d, g, count);
        sums.gg += square(g, count);
        if (step->plan->with_x) {
            const float *x = tensor->x + chunk->begin + begin;
            sums.dx += inner(d, x, count);
            sums.xx += square(x, count);
        }
    }
    step->partials[place] = sums;
}

/* What a base adds to x at an lr of `base_lr`, and its next state: the formulas of
   `kernels.formulas.propose`. */
static inline __attribute__((always_inline)) float propose(
    const int formula, const Move *by, Biases biases, float x, float g, float *first,
    float *second) {
    float direction;
    g *= by->factor;
    if (formula != ADAMW && formula != LION)
        g += by->decay * x;
    if (formula == ADAM || formula == ADAMW) {
        *first += by->rest_a * (g - *first);
        *second = by->b * *second + by->rest_b * g * g;
        direction = biases.first * *first / (biases.second * sqrtf(*second) + by->eps);
        if (formula == ADAMW)
            direction += by->decay * x;
    } else if (formula == LION) {
        float mixed = by->a * *first + by->rest_a * g;
        direction = (mixed > 0 ? 1.0f : 0.0f) - (mixed < 0 ? 1.0f : 0.0f) + by->decay * x;
        *first = by->b * *first + by->rest_b * g;
    } else if (formula == SGD) {
        direction = g;
    } else {
        *first = by->a * *first + by->rest_b * g;
        direction = formula == NESTEROV ? g + by->a * *first : *first;
    }
    return -by->base_lr * direction;
}

static inline __attribute__((always_inline)) double square_proposals(
    const int formula, const Move *by, Biases biases, int64_t count, const float *x,
    const float *grad, const float *first, const float *second) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) {
        float slot_1 = formula == SGD ? 0 : first[i];
        float slot_2 = formula <= ADAMW ? second[i] : 0;
        double proposal = propose(formula, by, biases, x[i], grad[i], &slot_1, &slot_2);
        sum += proposal * proposal;
    }
    return sum;
}

static inline __attribute__((always_inline)) void update(
    const int formula, const Move *by, Biases biases, int64_t count, float *restrict x,
    const float *restrict grad, float *restrict delta, float *restrict first,
    float *restrict second) {
    const Move own = *by; /* in registers: the stores below might write to it */
    for (int64_t i = 0; i < count; ++i) {
        float slot_1 = formula == SGD ? 0 : first[i];
        float slot_2 = formula <= ADAMW ? second[i] : 0;
        float proposal = propose(formula, &own, biases, x[i], grad[i], &slot_1, &slot_2);
        if (formula != SGD)
            first[i] = slot_1;
        if (formula <= ADAMW)
            second[i] = slot_2;
        if (!own.is_live)
            continue;
        x[i] += own.x_per_stored * delta[i] + own.x_per_proposal * proposal;
        delta[i] = own.kept * delta[i] + own.stored_per_proposal * proposal;
    }
}

/* Where the elements of a chunk lie, and what is done to them. */
typedef struct {
    float *x, *delta, *first, *second;
    const float *grad; /* NULL where there is none */
    const Move *by;
    Biases biases;
    int64_t count;
    int formula;
} Piece;

static Piece find_piece(const Step *step, int64_t place) {
    const Chunk *chunk = &step->plan->chunks[place];
    const Tensor *tensor = &step->plan->tensors[chunk->tensor];
    const float *grad = step->grads[chunk->tensor];
    return (Piece){
        .x = tensor->x + chunk->begin,
        .delta = tensor->delta + chunk->begin,
        .first = tensor->first ? tensor->first + chunk->begin : NULL,
        .second = tensor->second ? tensor->second + chunk->begin : NULL,
        .grad = grad ? grad + chunk->begin : NULL,
        .by = &step->moves[tensor->group],
        .biases = step->biases[chunk->tensor],
        .count = chunk->count,
        .formula = (int)step->plan->groups[tensor->group].formula,
    };
}

/* A loop of its own for each formula. */
#define FOR_FORMULA(work) \
    switch (p.formula) { \
        case ADAM: work(ADAM); break; \
        case ADAMW: work(ADAMW); break; \
        case SGD: work(SGD); break; \
        case MOMENTUM: work(MOMENTUM); break; \
        case NESTEROV: work(NESTEROV); break; \
        case LION: work(LION); break; \
    }

static void square_chunk(const Step *step, int64_t place) {
    Piece p = find_piece(step, place);
    double sum = 0;
#define SQUARE(formula) \
    sum = square_proposals(formula, p.by, p.biases, p.count, p.x, p.grad, p.first, p.second)
    if (p.grad != NULL && p.by->is_live) {
        FOR_FORMULA(SQUARE)
    }
    step->partials[place].uu = sum;
}

static void update_chunk(const Step *step, int64_t place) {
    Piece p = find_piece(step, place);
#define UPDATE(formula) \
    update(formula, p.by, p.biases, p.count, p.x, p.grad, p.delta, p.first, p.second)
    if (p.grad != NULL) {
        FOR_FORMULA(UPDATE)
    }
}
