// See sampler.h.
#include "sampler.h"

#include <algorithm>
#include <cmath>

#include "numerics.h"

namespace pdmesh {

// Dividing by less would overflow, and greedy is what is meant.
constexpr float kGreedyTemperature = 1e-5f;

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
  if (params.temperature < kGreedyTemperature || params.top_k == 1) return best;
  kernels.exp_shifted(logits, vocab_size, largest, 1.0f / params.temperature, weights_.data());
  const double number = uniform(params.seed, params.position);
  const bool has_top_k = params.top_k > 0 && params.top_k < vocab_size;
  const bool has_top_p = params.top_p < 1.0f;
  if (has_top_k) {
    gather_top_k(logits, params.top_k);
    double total = 0.0;
    for (const Candidate& candidate : candidates_) total += static_cast<double>(candidate.weight);
    if (has_top_p) keep_top_p(INFINITY, static_cast<double>(params.top_p) * total);
  } else if (has_top_p) {
    const double target =
        static_cast<double>(params.top_p) * kernels.sum_from(weights_.data(), vocab_size, 0.0f);
    const Bracket bracket = bracket_top_p(kernels, target);
    gather(logits, bracket.possible);
    keep_top_p(bracket.sure, target);
  } else if (params.min_p > 0.0f) {
    gather(logits, params.min_p);
  } else {
    return draw_from_all(number);
  }
  const auto is_small = [&](const Candidate& c) { return c.weight < params.min_p; };
  candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(), is_small),
                    candidates_.end());
  return draw(number);
}

bool Sampler::before(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.index < b.index);
}

// Halves the range of weights, as the integers that their bits are, until few lie within.
Sampler::Bracket Sampler::bracket_top_p(const Kernels& kernels, double target) const {
  constexpr std::uint32_t kNarrow = 1u << 17;  // a 64th of an octave
  constexpr double kSlack = 1e-5;              // far more than the sums' error
  const auto count = static_cast<std::int64_t>(weights_.size());
  const auto sum_from = [&](std::uint32_t bits) {
    return kernels.sum_from(weights_.data(), count, float_from_bits(bits));
  };
  std::uint32_t low = bits_from_float(0x1p-30f), high = bits_from_float(1.0f) + 1;
  if (sum_from(low) < target * (1 + kSlack)) return {float_from_bits(low), 0.0f};
  std::uint32_t sure = high;
  while (high - low > kNarrow) {
    const std::uint32_t middle = low + (high - low) / 2;
    const double held = sum_from(middle);
    if (held < target * (1 - kSlack)) sure = middle;
    (held < target * (1 + kSlack) ? high : low) = middle;
  }
  return {float_from_bits(sure), float_from_bits(low)};
}

void Sampler::gather(const float* logits, float floor) {
  candidates_.clear();
  for (std::size_t i = 0; i < weights_.size(); ++i) {
    if (weights_[i] >= floor) {
      candidates_.push_back({logits[i], weights_[i], static_cast<std::int64_t>(i)});
    }
  }
}

void Sampler::gather_top_k(const float* logits, std::int64_t top_k) {
  // Mostly the few tokens that hold nearly all the weight are enough.
  for (const float floor : {0x1p-10f, 0x1p-22f, 0.0f}) {
    gather(logits, floor);
    if (static_cast<std::int64_t>(candidates_.size()) >= top_k) break;
  }
  sorted_ = candidates_;
  std::nth_element(sorted_.begin(), sorted_.begin() + top_k - 1, sorted_.end(), before);
  drop_after(sorted_[static_cast<std::size_t>(top_k - 1)]);
}

void Sampler::keep_top_p(float sure, double target) {
  double held = 0.0;
  sorted_.clear();
  for (const Candidate& candidate : candidates_) {
    if (candidate.weight >= sure) {
      held += static_cast<double>(candidate.weight);
    } else {
      sorted_.push_back(candidate);
    }
  }
  std::sort(sorted_.begin(), sorted_.end(), before);
  const bool has_sure = sorted_.size() < candidates_.size();
  std::size_t kept = 0;
  while (kept < sorted_.size() && (held < target || (kept == 0 && !has_sure))) {
    held += static_cast<double>(sorted_[kept++].weight);
  }
  if (kept > 0) {
    drop_after(sorted_[kept - 1]);
  } else {
    const auto is_unsure = [&](const Candidate& c) { return c.weight < sure; };
    candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(), is_unsure),
                      candidates_.end());
  }
}

void Sampler::drop_after(const Candidate& last) {
  const auto is_after = [&](const Candidate& candidate) { return before(last, candidate); };
  candidates_.erase(std::remove_if(candidates_.begin(), candidates_.end(), is_after),
                    candidates_.end());
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

// As `draw`, but by stretches first, each of whose sums is taken in eight parallel parts.
std::int64_t Sampler::draw_from_all(double uniform) const {
  constexpr std::size_t kStretch = 512, kParts = 8;
  const std::size_t count = weights_.size();
  const auto stretch_sum = [&](std::size_t start) {
    double parts[kParts] = {};
    const std::size_t end = std::min(start + kStretch, count);
    std::size_t i = start;
    for (; i + kParts <= end; i += kParts) {
      for (std::size_t j = 0; j < kParts; ++j) parts[j] += static_cast<double>(weights_[i + j]);
    }
    for (; i < end; ++i) parts[0] += static_cast<double>(weights_[i]);
    double sum = 0.0;
    for (const double part : parts) sum += part;
    return sum;
  };
  double total = 0.0;
  for (std::size_t start = 0; start < count; start += kStretch) total += stretch_sum(start);
  const double target = uniform * total;
  double held = 0.0;
  std::int64_t last_possible = -1;
  for (std::size_t start = 0; start < count; start += kStretch) {
    const double sum = stretch_sum(start);
    if (held + sum <= target && start + kStretch < count) {
      held += sum;
      continue;
    }
    for (std::size_t i = start; i < std::min(start + kStretch, count); ++i) {
      if (weights_[i] > 0.0f) last_possible = static_cast<std::int64_t>(i);
      held += static_cast<double>(weights_[i]);
      if (held > target) return static_cast<std::int64_t>(i);
    }
  }
  for (std::size_t i = count; last_possible < 0 && i-- > 0;) {
    if (weights_[i] > 0.0f) last_possible = static_cast<std::int64_t>(i);
  }
  return last_possible;
}

}  // namespace pdmesh
