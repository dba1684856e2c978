/* A mechanized step of a known base on a CPU: the sums, the tuner, the update.

   `step` either makes the whole step, or returns 0 and has changed nothing. Whatever is out of the
   ordinary (NaN, gradients of an extreme size, tensors that overlap) is left to the plain path. */

/* Whether a gradient lies apart from all that the step writes to. */
static int lies_apart(const Plan *plan, int64_t begin, int64_t end) {
    int64_t low = 0, high = plan->written_count; /* the first region that ends after `begin` */
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (plan->written[middle].end <= begin)
            low = middle + 1;
        else
            high = middle;
    }
    return low == plan->written_count || plan->written[low].begin >= end;
}

static int are_grads_apart(const Step *step) {
    for (int64_t i = 0; i < step->plan->tensor_count; ++i) {
        int64_t begin = (int64_t)step->grads[i];
        int64_t end = begin + (int64_t)sizeof(float) * step->plan->tensors[i].count;
        if (begin % (int64_t)sizeof(float) || (begin && !lies_apart(step->plan, begin, end)))
            return 0;
    }
    return 1;
}

/* Whether sums in single precision are right: nothing in them that matters has vanished or become
   infinite. `measure.py` has the same bounds. */
static int is_right(double sum) {
    return 1e-30 < fabs(sum) && fabs(sum) < 1e30; /* never of a NaN */
}

/* Add up the sums of the chunks; 0 if the step is none for the passes. */
static int add_up(const Step *step, Sums *sums, double *all_gg) {
    const Plan *plan = step->plan;
    int has_live = 0;
    for (int64_t i = 0; i < plan->chunk_count; ++i) {
        int64_t tensor = plan->chunks[i].tensor;
        const Group *group = &plan->groups[plan->tensors[tensor].group];
        const Sums *own = &step->partials[i];
        sums->dd += own->dd;
        if (step->grads[tensor] == NULL)
            continue;
        *all_gg += own->gg;
        sums->dx += own->dx;
        sums->xx += own->xx;
        if (group->lr == 0)
            continue;
        has_live = 1;
        sums->dg += group->sign * own->dg;
        sums->gg += own->gg;
    }
    return has_live && is_right(sums->dg) && is_right(sums->dd) && is_right(sums->gg)
        && is_right(*all_gg) && (!plan->with_x || (is_right(sums->dx) && is_right(sums->xx)));
}

/* Whether gradients of this norm are for SGD at its usual lr, as `plain._suit_gradients` has it. */
static int suits_sgd(const Plan *plan, double norm) {
    for (int64_t i = 0; i < plan->group_count; ++i)
        if (plan->groups[i].formula >= SGD && plan->groups[i].formula <= NESTEROV)
            return 1e-6 < norm && norm < 1e12;
    return 1;
}

/* Whether S·Δ, the stored Δ and the factors of the proposals are all so small that the next step
   cannot overflow, as `plain._is_near` has it. */
static int is_near(const Plan *plan, const Given *given) {
    double length = sqrt(given->dd);
    for (int64_t i = 0; i < plan->group_count; ++i)
        length = fmax(length, plan->groups[i].unit);
    return length * plan->packed[plan->scale_at] <= plan->farthest
        && length <= plan->farthest * given->share;
}

/* From the sums of the chunks to what the rule is given; 0 if the step is none for the passes. */
static int weigh(const Step *step, Given *given, double *clip) {
    const Plan *plan = step->plan;
    Sums sums = {0};
    double all_gg = 0;
    if (!add_up(step, &sums, &all_gg))
        return 0;
    *clip = fmin(plan->max_norm / (sqrt(all_gg) + 1e-6), 1.0); /* torch's own ε */
    given->share = plan->packed[plan->share_at];
    given->dg = sums.dg * given->share * *clip;
    given->gg = sums.gg * *clip * *clip;
    given->dd = sums.dd * given->share * given->share;
    given->dx = sums.dx * given->share;
    given->xx = sums.xx;
    given->takes_part = 1;
    for (int64_t i = 0; i < plan->group_count; ++i)
        given->lr += plan->groups[i].lr;
    return is_right(given->gg) && isfinite(given->lr) && is_near(plan, given)
        && suits_sgd(plan, sqrt(given->gg));
}

/* The settings that the base is run at. */
static void write_settings(const Step *step, double clip) {
    for (int64_t i = 0; i < step->plan->group_count; ++i) {
        const Group *group = &step->plan->groups[i];
        step->moves[i] = (Move){
            .factor = (float)(group->sign * clip),
            .a = (float)group->a,
            .rest_a = (float)(1 - group->a),
            .b = (float)group->b,
            .rest_b = (float)(1 - group->b),
            .eps = (float)group->eps,
            .decay = (float)group->decay,
            .base_lr = (float)group->base_lr,
            .is_live = group->lr != 0,
        };
    }
}

/* In single precision, within which it stays: a proposal of 0 times inf is NaN. */
static float narrow(double value) {
    return (float)(value > FLT_MAX ? FLT_MAX : value < -FLT_MAX ? -FLT_MAX : value);
}

/* How the parameters and the displacements are moved, and the learning rates in force. */
static void write_moves(const Step *step, const Made *made) {
    for (int64_t i = 0; i < step->plan->group_count; ++i) {
        const Group *group = &step->plan->groups[i];
        Move *move = &step->moves[i];
        move->x_per_stored = narrow(made->x_per_stored);
        move->x_per_proposal = narrow(made->scale * group->unit);
        move->stored_per_proposal = narrow(group->unit / made->share);
        move->kept = (float)made->kept;
        *step->plan->rates[i] = (float)made->scale * (float)group->lr;
    }
}

/* The corrections of Adam's biases in this step. */
static void write_biases(const Step *step) {
    const Plan *plan = step->plan;
    int64_t last = -1;
    for (int64_t i = 0; i < plan->tensor_count; ++i) {
        const Tensor *tensor = &plan->tensors[i];
        if (tensor->counter == NULL || step->grads[i] == NULL)
            continue;
        float count = *tensor->counter + 1;
        const Tensor *before = last < 0 ? NULL : &plan->tensors[last];
        if (before != NULL && before->group == tensor->group
            && *before->counter == *tensor->counter) {
            step->biases[i] = step->biases[last];
            continue;
        }
        const Group *group = &plan->groups[tensor->group];
        step->biases[i].first = (float)(1 / (1 - pow(group->a, count)));
        step->biases[i].second = (float)(1 / sqrt(1 - pow(group->b, count)));
        last = i;
    }
}

/* Measure the update itself; 0 if that is not finite or of an extreme size. */
static int measure_update(const Step *step, Given *given) {
    const Plan *plan = step->plan;
    if (!plan->with_u)
        return 1;
    work_on_chunks(step, square_chunk);
    for (int64_t i = 0; i < plan->chunk_count; ++i) {
        double unit = plan->groups[plan->tensors[plan->chunks[i].tensor].group].unit;
        given->uu += step->partials[i].uu * (unit * unit);
    }
    return is_right(given->uu);
}

/* Count the step: the tuner, in the order of `counts.Counted`, and the base where it counts. */
static void count(const Step *step) {
    const Plan *plan = step->plan;
    plan->counts[0] += 1;
    plan->counts[1] += 1;
    plan->counts[3] = 0;
    for (int64_t i = 0; i < plan->tensor_count; ++i)
        if (plan->tensors[i].counter != NULL && step->grads[i] != NULL)
            *plan->tensors[i].counter += 1;
}

static int make(const Step *step, Rule *rule) {
    Given given = {0};
    Made made;
    double clip;
    if (!are_grads_apart(step))
        return 0;
    work_on_chunks(step, sum_chunk);
    if (!weigh(step, &given, &clip))
        return 0;
    write_settings(step, clip);
    write_biases(step);
    if (!measure_update(step, &given))
        return 0;
    rule(step->plan->packed, (const double *)&given, (double *)&made); /* from here on it writes */
    write_moves(step, &made);
    count(step);
    work_on_chunks(step, update_chunk);
    return 1;
}

/* Make a step: 1 if it was made, 0 if nothing has changed. */
int64_t step(const Plan *plan, const float *const *grads, Rule *rule, int64_t threads) {
    Step own = {plan, grads, NULL, NULL, NULL, threads};
    int is_made = 0;
    own.partials = malloc(sizeof(Sums) * (size_t)plan->chunk_count);
    own.moves = malloc(sizeof(Move) * (size_t)plan->group_count);
    own.biases = calloc((size_t)plan->tensor_count, sizeof(Biases));
    if (own.partials != NULL && own.moves != NULL && own.biases != NULL)
        is_made = make(&own, rule);
    free(own.partials);
    free(own.moves);
    free(own.biases);
    return is_made;
}
