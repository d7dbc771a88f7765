// See sampler.h.
#include "sampler.h"

#include <algorithm>
#include <cmath>

namespace pdmesh {

double uniform(std::int64_t seed, std::int64_t position) {
  std::uint64_t x = static_cast<std::uint64_t>(seed) * 0x9E3779B97F4A7C15u +
                    static_cast<std::uint64_t>(position) * 0xD1B54A32D192ED03u;
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9u;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBu;
  x ^= x >> 31;
  return static_cast<double>(x >> 11) * 0x1p-53;
}

void Sampler::reserve(std::int64_t vocab_size) {
  weights_.resize(static_cast<std::size_t>(vocab_size));
}

std::int64_t Sampler::sample(const Kernels& kernels, const float* logits, std::int64_t vocab_size,
                             const pdmesh_sampling& params) {
  float largest;
  const std::int64_t best = kernels.argmax(logits, vocab_size, &largest);
  if (!std::isfinite(largest)) return -1;
  if (params.temperature <= 0.0f || params.top_k == 1) return best;
  kernels.exp_shifted(logits, vocab_size, largest, 1.0f / params.temperature, weights_.data());
  gather(logits, vocab_size, params);
  return draw(uniform(params.seed, params.position));
}

// Leaves the kept tokens in `candidates_`, in index order.
void Sampler::gather(const float* logits, std::int64_t vocab_size, const pdmesh_sampling& params) {
  const bool has_top_k = params.top_k > 0 && params.top_k < vocab_size;
  const bool has_top_p = params.top_p < 1.0f;
  double total = 0.0;
  if (has_top_p && !has_top_k) {
    for (const float weight : weights_) total += static_cast<double>(weight);
  }
  // Few tokens hold nearly all the weight: look among those first, and at all only when neither
  // filter is satisfied by them.
  for (const float floor : {0x1p-10f, 0x1p-22f, 0.0f}) {
    const float limit = has_top_k || has_top_p ? floor : 0.0f;
    candidates_.clear();
    double held = 0.0;
    for (std::int64_t i = 0; i < vocab_size; ++i) {
      const float weight = weights_[static_cast<std::size_t>(i)];
      if (weight < limit || (!has_top_k && !has_top_p && weight < params.min_p)) continue;
      candidates_.push_back({logits[i], weight, i});
      held += static_cast<double>(weight);
    }
    const auto count = static_cast<std::int64_t>(candidates_.size());
    const bool is_enough = has_top_k ? count >= params.top_k
                                     : held >= static_cast<double>(params.top_p) * total;
    if (limit == 0.0f || is_enough) break;
  }
  if (has_top_k || has_top_p) keep_top(params, total);
}

void Sampler::keep_top(const pdmesh_sampling& params, double total) {
  const auto before = [](const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.index < b.index);
  };
  const auto begin = candidates_.begin();
  if (params.top_k > 0 && params.top_k < static_cast<std::int64_t>(candidates_.size())) {
    std::nth_element(begin, begin + params.top_k - 1, candidates_.end(), before);
    candidates_.resize(static_cast<std::size_t>(params.top_k));
  }
  if (params.top_p < 1.0f) {
    std::sort(candidates_.begin(), candidates_.end(), before);
    if (params.top_k > 0) {
      total = 0.0;
      for (const Candidate& candidate : candidates_) total += static_cast<double>(candidate.weight);
    }
    const double target = static_cast<double>(params.top_p) * total;
    double held = 0.0;
    std::size_t kept = 0;
    while (kept < candidates_.size() && (kept == 0 || held < target)) {
      held += static_cast<double>(candidates_[kept++].weight);
    }
    candidates_.resize(kept);
  }
  const auto is_small = [&](const Candidate& c) { return c.weight < params.min_p; };
  candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(), is_small),
                    candidates_.end());
  std::sort(candidates_.begin(), candidates_.end(),
            [](const Candidate& a, const Candidate& b) { return a.index < b.index; });
}

std::int64_t Sampler::draw(double uniform) const {
  double total = 0.0;
  for (const Candidate& candidate : candidates_) total += static_cast<double>(candidate.weight);
  const double target = uniform * total;
  double held = 0.0;
  std::int64_t last_possible = -1;
  for (const Candidate& candidate : candidates_) {
    if (candidate.weight > 0.0f) last_possible = candidate.index;
    held += static_cast<double>(candidate.weight);
    if (held > target) return candidate.index;
  }
  return last_possible;  // rounding has carried the target to the very end
}

}  // namespace pdmesh
