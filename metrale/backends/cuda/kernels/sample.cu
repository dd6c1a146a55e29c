// Choosing tokens: penalties, argmax, filtered Gumbel-max sampling, log-probabilities. Logits are float32.
//
// Variants:  none
// Launch:    one block of 256 threads a row.
// Numerics:  comparisons of float32 logits are exact; probabilities and noise are float64 (masses sum float32 weights).
// Source:    Salmon et al. 2011 (Philox), Maddison et al. 2014 (Gumbel-max), Keskar et al. 2019 (repetition penalty)

#include "numbers.cuh"
#include "reduce.cuh"
#include "philox.cuh"

__device__ inline float float_field(const int *field, int which) { return __int_as_float(field[which]); }

// What a logit counts as: NaN never wins.
__device__ inline float countable(float x) { return is_nan(x) ? -infinity() : x; }

// The lowest id of the largest logit of a row; 0 where there is none above -inf. The whole block calls it.
__device__ inline int best_of(const float *logits, int vocab) {
    float top = -infinity();
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) top = fmaxf(top, countable(logits[i]));
    top = block_reduce(top, Max());
    int best = vocab;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
        if (countable(logits[i]) == top) best = min(best, i);
    }
    return block_reduce(best, Min());
}

// ids (T,); logits (T, vocab)
KERNEL(argmax)(int *ids, const float *logits, int vocab, i64 logits_row) {
    const int best = best_of(logits + blockIdx.x * logits_row, vocab);
    if (threadIdx.x == 0) ids[blockIdx.x] = best;
}

// --- penalties --------------------------------------------------------------------------------------------------------

// Divide or multiply every token of history[0, length) once; counts end as they began, zero.
__device__ inline void penalise_repetition(float *logits, int *counts, const int *history, int length, int vocab,
                                           float factor) {
    for (int i = threadIdx.x; i < length; i += blockDim.x) {
        const int token = history[i];
        if (token < 0 || token >= vocab || atomicAdd(counts + token, 1) != 0) continue;  // another thread has it
        logits[token] = logits[token] > 0.0f ? logits[token] / factor : logits[token] * factor;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < length; i += blockDim.x) {
        if (history[i] >= 0 && history[i] < vocab) counts[history[i]] = 0;
    }
    __syncthreads();
}

// Subtract frequency * count + presence for the tokens of history[start, length); counts end zero.
__device__ inline void penalise_presence(float *logits, int *counts, const int *history, int start, int length, int vocab,
                                         float presence, float frequency) {
    for (int i = start + threadIdx.x; i < length; i += blockDim.x) {
        if (history[i] >= 0 && history[i] < vocab) atomicAdd(counts + history[i], 1);
    }
    __syncthreads();
    for (int i = start + threadIdx.x; i < length; i += blockDim.x) {
        const int token = history[i];
        if (token < 0 || token >= vocab) continue;
        const int count = atomicExch(counts + token, 0);  // the first thread to come gets the count, the others 0
        if (count > 0) logits[token] -= frequency * count + presence;
    }
    __syncthreads();
}

// logits, counts (T, vocab); seq, index (T,); fields (rows, NUM_FIELDS); bias_* (rows, MAX_BIAS); history (rows, max_tokens)
KERNEL(penalize)(float *logits, int *counts, const int *seq, const int *index, const int *fields, const int *bias_ids,
                 const int *bias_values, const int *bias_until, const int *history, int vocab, int rows, int max_tokens,
                 i64 logits_row, i64 counts_row) {
    const int t = blockIdx.x, row = seq[t];
    if (row < 0 || row >= rows) return;
    logits += t * logits_row;
    counts += t * counts_row;
    history += static_cast<i64>(row) * max_tokens;
    const int *field = fields + static_cast<i64>(row) * NUM_FIELDS;
    const int length = min(index[t] + 1, max_tokens);
    const float repetition = float_field(field, FIELD_REPETITION);
    const float presence = float_field(field, FIELD_PRESENCE), frequency = float_field(field, FIELD_FREQUENCY);
    if (repetition != 1.0f) penalise_repetition(logits, counts, history, length, vocab, repetition);
    if (presence != 0.0f || frequency != 0.0f) {
        penalise_presence(logits, counts, history, max(0, field[FIELD_PROMPT_LEN]), length, vocab, presence, frequency);
    }
    if (threadIdx.x != 0) return;
    const i64 first = static_cast<i64>(row) * MAX_BIAS;
    const int used = min(field[FIELD_NUM_BIAS], MAX_BIAS);
    for (int i = 0; i < used; ++i) {  // in order, by one thread: two entries may name one token
        const int token = bias_ids[first + i];
        const float value = __int_as_float(bias_values[first + i]);
        if (token < 0 || token >= vocab || index[t] + 1 >= bias_until[first + i]) continue;
        logits[token] = value == -infinity() ? value : logits[token] + value;
    }
}

// --- sampling ---------------------------------------------------------------------------------------------------------

// Floats as integers of the same order; both zeros are one value.
__device__ inline u32 ordered(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// A prefix of the ids sorted by logit, largest first, then by id: those above `key`, and those equal to it up to `id`.
struct Cut {
    u32 key;
    int id;

    __device__ bool keeps(float x, int i) const {
        if (!(x > -infinity())) return false;  // NaN and bans
        const u32 mine = ordered(x);
        return mine > key || (mine == key && i <= id);
    }
};

// Return the shortest prefix whose measure reaches `goal`, given that the whole of `within` does. measure(i) is what id i
// adds, equal for equal logits. The whole block calls it: bisection of the key's bits, then of the id.
template <class Measure>
__device__ inline Cut shortest_prefix(const float *logits, int vocab, Cut within, double goal, Measure measure) {
    u32 key = 0;
    for (int bit = 31; bit >= 0; --bit) {
        const u32 attempt = key | 1u << bit;
        double sum = 0.0;
        for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
            if (within.keeps(logits[i], i) && ordered(logits[i]) >= attempt) sum += measure(i);
        }
        if (block_reduce(sum, Sum()) >= goal) key = attempt;
    }
    int low = 0, high = vocab - 1;  // the id lies in [low, high]
    while (low < high) {
        const Cut attempt = {key, (low + high) / 2};
        double sum = 0.0;
        for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
            if (within.keeps(logits[i], i) && attempt.keeps(logits[i], i)) sum += measure(i);
        }
        if (block_reduce(sum, Sum()) >= goal) {
            high = attempt.id;
        } else {
            low = attempt.id + 1;
        }
    }
    return {key, low};
}

// The weight of a logit against the best one, at temperature.
__device__ inline double likelihood(float x, float top, double temperature) {
    return x == top ? 1.0 : exp(x / temperature - top / temperature);
}

// The ids top-k and top-p leave. weights: (vocab,) scratch.
__device__ inline Cut filtered(const float *logits, float *weights, int vocab, float top, double temperature, int top_k,
                               double top_p) {
    Cut cut = {0, vocab};
    if (top_k > 0) {
        double alive = 0.0;
        for (int i = threadIdx.x; i < vocab; i += blockDim.x) alive += cut.keeps(logits[i], i);
        if (block_reduce(alive, Sum()) > top_k) {
            cut = shortest_prefix(logits, vocab, cut, top_k, [](int) { return 1.0; });
        }
    }
    if (top_p < 1.0) {
        double total = 0.0;
        for (int i = threadIdx.x; i < vocab; i += blockDim.x) {  // a thread reads back only what it wrote
            weights[i] = cut.keeps(logits[i], i) ? likelihood(logits[i], top, temperature) : 0.0;
            total += weights[i];
        }
        const double goal = fmax(top_p * block_reduce(total, Sum()), 1e-300);  // at least one id, also for top-p 0
        cut = shortest_prefix(logits, vocab, cut, goal, [weights](int i) { return static_cast<double>(weights[i]); });
    }
    return cut;
}

// ids (T,); logits, scratch (T, vocab); seq, index (T,); fields (rows, NUM_FIELDS)
KERNEL(sample)(int *ids, const float *logits, const int *seq, const int *index, const int *fields, float *scratch, int vocab,
               int rows, i64 logits_row, i64 scratch_row) {
    const int t = blockIdx.x, row = seq[t];
    if (row < 0 || row >= rows) {
        if (threadIdx.x == 0) ids[t] = 0;
        return;
    }
    logits += t * logits_row;
    const int *field = fields + static_cast<i64>(row) * NUM_FIELDS;
    const double temperature = float_field(field, FIELD_TEMPERATURE);
    const int best = best_of(logits, vocab);
    if (temperature == 0.0 || !(logits[best] > -infinity())) {
        if (threadIdx.x == 0) ids[t] = best;
        return;
    }
    const float top = logits[best];
    const Cut cut = filtered(logits, scratch + t * scratch_row, vocab, top, temperature, field[FIELD_TOP_K],
                             float_field(field, FIELD_TOP_P));
    const double min_p = float_field(field, FIELD_MIN_P);
    double highest = -infinity();
    int chosen = vocab;
    for (int group = threadIdx.x; 4 * group < vocab; group += blockDim.x) {
        const Words words = philox(group, index[t] + 1, field[FIELD_CHOICE], 0, field[FIELD_SEED_LO], field[FIELD_SEED_HI]);
#pragma unroll 1
        for (int lane = 0; lane < 4; ++lane) {
            const int i = 4 * group + lane;
            if (i >= vocab || !cut.keeps(logits[i], i) || likelihood(logits[i], top, temperature) < min_p) continue;
            const double score = logits[i] / temperature + gumbel(words.word[lane]);
            if (score > highest) {  // ids ascend, so that a tie keeps the lower one
                highest = score;
                chosen = i;
            }
        }
    }
    const double winner = block_reduce(highest, Max());
    chosen = block_reduce(highest == winner ? chosen : vocab, Min());
    if (threadIdx.x == 0) ids[t] = chosen < vocab ? chosen : 0;
}

// --- log-probabilities ------------------------------------------------------------------------------------------------

// logprob (depth, rows), top_ids, top_logprobs (depth, rows, MAX_TOP_LOGPROBS) in pinned memory; cursor (1,);
// logits (T, vocab); ids, seq (T,); fields (rows, NUM_FIELDS)
KERNEL(logprobs)(float *logprob, int *top_ids, float *top_logprobs, const int *cursor, const float *logits, const int *ids,
                 const int *seq, const int *fields, int vocab, int rows, int depth, i64 logits_row) {
    const int t = blockIdx.x, row = seq[t];
    if (row < 0 || row >= rows) return;
    const int asked = fields[static_cast<i64>(row) * NUM_FIELDS + FIELD_LOGPROBS];
    if (asked < 0) return;
    logits += t * logits_row;
    const i64 entry = static_cast<i64>(*cursor % depth) * rows + t;
    float top = -infinity();
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) top = fmaxf(top, countable(logits[i]));
    top = block_reduce(top, Max());
    double sum = 0.0;
    for (int i = threadIdx.x; i < vocab; i += blockDim.x) sum += exp(static_cast<double>(countable(logits[i])) - top);
    const double log_sum = log(block_reduce(sum, Sum()));
    const int chosen = ids[t];
    if (threadIdx.x == 0 && chosen >= 0 && chosen < vocab) {
        logprob[entry] = static_cast<double>(countable(logits[chosen])) - top - log_sum;
    }
    float last = infinity();
    int last_id = -1;  // the previous best: the next one is smaller, or equal with a higher id
    const int wanted = min(min(asked, MAX_TOP_LOGPROBS), vocab);
    for (int place = 0; place < wanted; ++place) {
        float next = -infinity();
        int next_id = vocab;
        for (int i = threadIdx.x; i < vocab; i += blockDim.x) {
            const float x = countable(logits[i]);
            if (!(x < last || (x == last && i > last_id))) continue;
            if (x > next || next_id == vocab) {
                next = x;
                next_id = i;
            }
        }
        last = block_reduce(next, Max());
        last_id = block_reduce(next_id < vocab && next == last ? next_id : vocab, Min());
        if (threadIdx.x == 0) {
            top_ids[entry * MAX_TOP_LOGPROBS + place] = last_id;
            top_logprobs[entry * MAX_TOP_LOGPROBS + place] = static_cast<double>(last) - top - log_sum;
        }
    }
    __threadfence_system();
}
