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

  static bool before(const Candidate& a, const Candidate& b);
  // Weights from which on a top-p set certainly is kept, and below which it certainly is not.
  struct Bracket {
    float sure, possible;
  };
  Bracket bracket_top_p(const Kernels& kernels, double target) const;
  void gather(const float* logits, float floor);
  void gather_top_k(const float* logits, std::int64_t top_k);
  // Of the candidates that are not sure, sorted, keeps as many as `target` wants with the others.
  void keep_top_p(float sure, double target);
  void drop_after(const Candidate& last);
  std::int64_t draw(double uniform) const;
  std::int64_t draw_from_all(double uniform) const;

  std::vector<float> weights_;
  std::vector<Candidate> candidates_;  // in index order
  std::vector<Candidate> sorted_;
};

}  // namespace pdmesh
