// The kernels by name: for the number types that the macros GENSET_BF16, GENSET_F16 and GENSET_F32 select, and for logits,
// GENSET_LOGITS.
//
// `nvcc` compiles a module of each; `emulation/` compiles the same for the host.
#include "attention.cuh"
#include "prefill.cuh"
#include "products.cuh"
#include "rows.cuh"

#ifdef __CUDACC__
#define KERNEL(NAME, THREADS, ARGUMENTS, ...)                                                                                \
  extern "C" __global__ void __launch_bounds__(THREADS) NAME(const ARGUMENTS arguments) { __VA_ARGS__(arguments); }
#else
#define KERNEL(NAME, THREADS, ARGUMENTS, ...)                                                                                \
  static const emulation::Kernel kernel_##NAME(                                                                              \
      #NAME, THREADS, [](const void *arguments) { __VA_ARGS__(*static_cast<const ARGUMENTS *>(arguments)); });
#endif

#define ATTEND(T, LANES, NAME)                                                                                               \
  KERNEL(attend_q1_l##LANES##_##NAME, ATTEND_THREADS<1>, AttendArguments<T>, attend<T, LANES, 1>)                            \
  KERNEL(attend_q2_l##LANES##_##NAME, ATTEND_THREADS<2>, AttendArguments<T>, attend<T, LANES, 2>)                            \
  KERNEL(attend_q4_l##LANES##_##NAME, ATTEND_THREADS<4>, AttendArguments<T>, attend<T, LANES, 4>)                            \
  KERNEL(attend_q8_l##LANES##_##NAME, ATTEND_THREADS<8>, AttendArguments<T>, attend<T, LANES, 8>)

#define PRODUCT(T, ROWS, NAME)                                                                                               \
  KERNEL(product_r##ROWS##_##NAME, PRODUCT_THREADS, ProductArguments<T>, product<T, ROWS>)                                   \
  KERNEL(gated_product_r##ROWS##_##NAME, PRODUCT_THREADS, ProductArguments<T>, gated_product<T, ROWS>)

#define KERNELS(T, NAME)                                                                                                     \
  KERNEL(heads_##NAME, HEAD_THREADS, HeadArguments<T>, heads<T>)                                                             \
  ATTEND(T, 4, NAME) ATTEND(T, 8, NAME) ATTEND(T, 16, NAME) ATTEND(T, 32, NAME)                                              \
  KERNEL(merge_##NAME, MERGE_THREADS, AttendArguments<T>, merge<T>)                                                          \
  KERNEL(norm_##NAME, ROW_THREADS, NormArguments<T>, norm<T>)                                                                \
  KERNEL(gate_##NAME, ROW_THREADS, GateArguments<T>, gate<T>)                                                                \
  PRODUCT(T, 1, NAME) PRODUCT(T, 2, NAME)

// Tensor cores do not support f32.
#define PREFILL_KERNELS(T, NAME)                                                                                             \
  KERNEL(prefill_d32_##NAME, PREFILL_THREADS, AttendArguments<T>, prefill<T, 32>)                                            \
  KERNEL(prefill_d64_##NAME, PREFILL_THREADS, AttendArguments<T>, prefill<T, 64>)                                            \
  KERNEL(prefill_d128_##NAME, PREFILL_THREADS, AttendArguments<T>, prefill<T, 128>)                                          \
  KERNEL(prefill_d256_##NAME, PREFILL_THREADS, AttendArguments<T>, prefill<T, 256>)

#ifdef GENSET_BF16
KERNELS(__nv_bfloat16, bf16)
PREFILL_KERNELS(__nv_bfloat16, bf16)
#endif
#ifdef GENSET_F16
KERNELS(__half, f16)
PREFILL_KERNELS(__half, f16)
#endif
#ifdef GENSET_F32
KERNELS(float, f32)
#endif
#ifdef GENSET_LOGITS
KERNEL(best_logits, ROW_THREADS, BestArguments, best)
#endif
