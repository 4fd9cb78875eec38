//! The decoder as on a GPU: by tensor operations, by kernels, and in recorded steps.

use super::*;

#[test]
fn logits_by_tensor_operations_equal_the_reference() {
    compare_with_reference_as_on_gpu(&Device::Cpu, DType::F32, TOLERANCE, false);
}

/// On a GPU in each supported type; emulated in f32, the host's type of activations.
#[cfg(any(feature = "cuda", kernels_are_emulated))]
#[test]
fn logits_by_kernels_for_gpus_equal_the_reference() {
    let device = kernels::test_device();
    // 16-bit floats round every activation: by 2^-11 in f16, by 2^-8 in bf16.
    let all = [(DType::F32, 1e-3), (DType::F16, 3e-2), (DType::BF16, 3e-1)];
    let dtypes = if device.is_cpu() { &all[..1] } else { &all[..] };
    for (dtype, tolerance) in dtypes {
        compare_with_reference_as_on_gpu(&device, *dtype, *tolerance, true);
    }
}

fn compare_with_reference_as_on_gpu(
    device: &Device,
    dtype: DType,
    tolerance: f32,
    has_kernels: bool,
) {
    for name in MODELS {
        let (model, config) = load_on(name, Quantization::None, device, dtype);
        for case in cases(name) {
            let mut kv =
                KvCache::try_new_as_on_gpu(&config, spec(dtype), device, has_kernels).unwrap();
            let blocks = scattered_blocks(0);
            let half = case.tokens.len() / 2;
            let chunk = Chunk {
                tokens: &case.tokens[..half],
                done: 0,
                blocks: &blocks,
            };
            model
                .forward(
                    &mut kv,
                    &step(if half > 0 {
                        std::slice::from_ref(&chunk)
                    } else {
                        &[]
                    }),
                )
                .unwrap();
            let chunk = Chunk {
                tokens: &case.tokens,
                done: half,
                blocks: &blocks,
            };
            let got = rows(&model.forward(&mut kv, &step(&[chunk])).unwrap());
            let kept = got.len().min(case.logits.len());
            let want = &case.logits[case.logits.len() - kept..];
            assert_close(
                &got[got.len() - kept..],
                want,
                tolerance,
                &format!("{name} in {dtype:?}, {} tokens", case.tokens.len()),
            );
        }
    }
}

/// A split context beside a prompt in chunks, through every layer.
#[cfg(any(feature = "cuda", kernels_are_emulated))]
#[test]
fn kernels_for_gpus_mix_chunks_and_decode_rows() {
    let device = kernels::test_device();
    for name in ["llama", "gemma2", "gemma3"] {
        let (on_host, config) = load(name, Quantization::None);
        let (model, _) = load_on(name, Quantization::None, &device, DType::F32);
        let spec = KvCacheSpec {
            num_blocks: 200,
            ..spec(DType::F32)
        };
        let mut host = KvCache::try_new(&config, spec.clone(), &Device::Cpu).unwrap();
        let mut kv = KvCache::try_new_as_on_gpu(&config, spec, &device, true).unwrap();
        let tokens: Vec<u32> = (0..600).map(|i| 3 + i * 37 % 93).collect();
        let blocks: Vec<u32> = (0..200).map(|i| (i * 7 + 3) % 200).collect();
        let (long, short) = blocks.split_at(150);
        // The long sequence's prompt, then its decode row beside the chunks of the short one.
        for (long_done, long_end, short_done, short_end) in
            [(0, 599, 0, 0), (599, 600, 0, 21), (600, 600, 21, 50)]
        {
            let chunks = [
                Chunk {
                    tokens: &tokens[..long_end],
                    done: long_done,
                    blocks: long,
                },
                Chunk {
                    tokens: &tokens[..short_end],
                    done: short_done,
                    blocks: short,
                },
            ];
            let chunks: Vec<_> = chunks
                .into_iter()
                .filter(|chunk| chunk.done < chunk.tokens.len())
                .collect();
            let batch = step(&chunks);
            let want = rows(&on_host.forward(&mut host, &batch).unwrap());
            let got = rows(&model.forward(&mut kv, &batch).unwrap());
            assert_close(&got, &want, 1e-3, name);
        }
    }
}

/// Compares decode steps that are recorded and replayed with steps queued kernel by kernel: three sequences that end one after
/// the other, across the ends of KV blocks and of a rounded-up context.
#[cfg(feature = "cuda")]
#[test]
fn recorded_steps_equal_those_that_are_not() {
    let device = kernels::test_device();
    for (name, dtype, tolerance) in [
        ("llama", DType::F32, 1e-3),
        ("qwen2", DType::F16, 3e-2),
        ("gemma2", DType::BF16, 3e-1),
        ("gemma3", DType::F32, 1e-3),
        ("gpt-oss-bf16", DType::F32, 1e-3),
    ] {
        let (model, config) = load_on(name, Quantization::None, &device, dtype);
        let spec = KvCacheSpec {
            num_blocks: 241,
            ..spec(dtype)
        };
        let cache = || KvCache::try_new_as_on_gpu(&config, spec.clone(), &device, true).unwrap();
        let (mut kv, mut plain) = (cache(), cache());
        let mut graphs = graphs::Graphs::new(false);
        let tokens: Vec<u32> = (0..300).map(|i| 3 + i * 37 % 93).collect();
        let blocks: Vec<u32> = (0..240).map(|i| (i * 7 + 3) % 240).collect();
        let blocks: Vec<&[u32]> = blocks.chunks(80).collect();
        let first = [250, 30, 7];
        let chunk = |sequence: usize, done, end| Chunk {
            tokens: &tokens[sequence..sequence + end],
            done,
            blocks: blocks[sequence],
        };
        let prompts = step(&[0, 1, 2].map(|sequence| chunk(sequence, 0, first[sequence])));
        for kv in [&mut kv, &mut plain] {
            assert!(graphs.forward(&model, kv, &prompts).unwrap().is_none());
            model.forward(kv, &prompts).unwrap();
        }
        for done in 0..20 {
            let alive = 3 - done / 8;
            let chunks: Vec<_> = (0..alive)
                .map(|sequence| chunk(sequence, first[sequence] + done, first[sequence] + done + 1))
                .collect();
            let batch = step(&chunks);
            let want = rows(&model.forward(&mut plain, &batch).unwrap());
            let got = graphs.forward(&model, &mut kv, &batch).unwrap();
            let got = got.unwrap_or_else(|| model.forward(&mut kv, &batch).unwrap());
            assert_close(
                &rows(&got),
                &want,
                tolerance,
                &format!("{name}, step {done}"),
            );
        }
        // A mixture of experts returns to the CPU in the middle of a step.
        let expected = if config.experts.is_some() { 0 } else { 4 };
        assert_eq!(graphs.count(), expected, "{name}");
    }
}
