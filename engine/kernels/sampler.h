// Draws one token from one row of logits without sorting the vocabulary.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "pdmesh_kernels.h"

namespace pdmesh {

// Uniform in [0, 1), a function of its arguments alone.
double uniform(std::int64_t seed, std::int64_t position);

class Sampler {
 public:
  void reserve(std::int64_t vocab_size);
  // Temperature, then top-k, then top-p of what is left, then min-p; the token is where the
  // cumulative weight of the kept tokens, in index order, passes the uniform number. Among equal
  // logits the smaller index comes first. -1 when the largest logit is not finite.
  std::int64_t sample(const Kernels& kernels, const float* logits, std::int64_t vocab_size,
                      const pdmesh_sampling& params);

 private:
  struct Candidate {
    float logit, weight;
    std::int64_t index;
  };

  void gather(const float* logits, std::int64_t vocab_size, const pdmesh_sampling& params);
  void keep_top(const pdmesh_sampling& params, double total);
  std::int64_t draw(double uniform) const;

  std::vector<float> weights_;
  std::vector<Candidate> candidates_;
};

}  // namespace pdmesh
