//! From logits to a token: sampling options, log probabilities, guided decoding.
//!
//! The crate is pure: slices of `f32` in, a token id out, without tensors, threads or a clock. An engine calls it once per
//! sequence and step, after the forward pass, and shares nothing between sequences.
//!
//! - [`Sampler`]: a request's options and its tokens so far; [`Sampler::sample`] chooses, [`Sampler::accept`] records, and
//!   [`Sampler::accept_sampled`] also says whether the answer ends.
//! - [`TokenMask`]: the tokens that may come next.
//! - [`guided`]: compiles a schema, a regular expression, choices or a grammar to masks.
//!
//! # Order
//! The order of the steps is that of vLLM's V1 sampler:
//! 1. log probabilities are taken from the *raw* logits: `log_softmax` of the model's output, before any of the steps
//!    below. This is what vLLM (`logprobs_mode=raw_logprobs`) and OpenAI report;
//! 2. the mask, and the ban of stop tokens until `min_tokens`;
//! 3. `logit_bias`;
//! 4. `repetition_penalty`, then `frequency_penalty` and `presence_penalty`;
//! 5. greedy requests take the best logit, and ties go to the lowest id. The others continue with
//! 6. `temperature`, `min_p`, `top_k`, `top_p` (each on the candidates that the one before kept), and one draw.
//!
//! # Examples
//! ```
//! use genset_backend_common::GenerateRequest;
//! use genset_sampling::Sampler;
//!
//! let request = GenerateRequest::from_tokens("tiny-chat", vec![1, 2]);
//! let mut sampler = Sampler::try_new(&request, 4, 0)?;
//! let sampled = sampler.sample(&mut [0.1, 2.0, 0.3, 2.0], None)?;
//! assert_eq!(sampled.token, 1);
//! sampler.accept(sampled.token);
//! # Ok::<(), genset_backend_common::EngineError>(())
//! ```

mod draw;
mod error;
pub mod guided;
mod logprobs;
mod mask;
mod math;
mod penalties;
mod sampler;
mod select;

pub use error::SampleError;
pub use mask::TokenMask;
pub use math::best_token;
pub use sampler::{Sampled, Sampler};
