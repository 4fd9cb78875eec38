//! [`Forward`]: the engine thread's interface to a model; and [`Fetched`], the part of its logits that the sampler reads.

use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};

use candle_core::{D, Result, Tensor};
use genset_backend_common::TokenId;
use genset_sampling::best_token;

use crate::model::{KvLayout, ProductTime, StepBatch, host, kernels};

/// Why a step failed. Every request in it fails.
pub(crate) type ForwardError = Box<dyn Error + Send + Sync>;

/// A model with its KV cache.
pub(crate) trait Forward: Send {
    /// Computes the batch's rows: stores their keys and values in their slots, and returns the logits of the wanted rows,
    /// `[logit_rows, vocab_size]` f32.
    ///
    /// # Errors
    /// Any; the step's requests fail, and the engine continues.
    fn forward(&mut self, batch: &StepBatch) -> std::result::Result<Tensor, ForwardError>;

    /// Times the products of a step in which `sequences` sequences decode, `repeats` times; `None` if it has none on the CPU.
    ///
    /// # Errors
    /// Any.
    fn time_products(
        &self,
        _sequences: usize,
        _repeats: usize,
    ) -> std::result::Result<Option<Vec<ProductTime>>, ForwardError> {
        Ok(None)
    }

    /// The layout of the bytes of KV blocks, if they are accessible.
    fn kv_layout(&self) -> Option<&KvLayout> {
        None
    }

    /// The bytes of a KV block, if they are accessible.
    fn kv_block(&self, _block: usize) -> Option<&[u8]> {
        None
    }

    /// The same bytes, mutable.
    fn kv_block_mut(&mut self, _block: usize) -> Option<&mut [u8]> {
        None
    }
}

/// Runs `work`, and turns a panic into an error.
///
/// # Errors
/// Those of `work`.
pub(crate) fn contained<T>(
    work: impl FnOnce() -> std::result::Result<T, ForwardError>,
) -> std::result::Result<T, ForwardError> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(ForwardError::from(panic_text(&*panic))))
}

/// The message of a panic.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("it panicked: {}", text.unwrap_or("(no message)"))
}

/// One row of logits on its way to the sampler.
#[derive(Debug)]
pub(crate) enum Fetched {
    /// The whole row: `[vocab_size]`.
    Logits(Vec<f32>),
    /// The best token, found where the row is.
    Best(TokenId),
    /// The row contains an invalid logit, found on a GPU.
    NotFinite,
}

/// Fetches rows of `logits` (`[rows, vocab_size]`) for the sampler. A row with `is_best` only needs its best token, which is
/// found on the device; the row stays there.
///
/// # Errors
/// Candle fails, or the shape is wrong.
pub(crate) fn fetch(logits: &Tensor, is_best: &[bool]) -> Result<Vec<Fetched>> {
    let (rows, vocab_size) = logits.dims2()?;
    if rows != is_best.len() {
        candle_core::bail!(
            "{rows} rows of logits for {} that were asked for",
            is_best.len()
        );
    }
    if logits.device().is_cpu() {
        return host::map_rows(logits, |row, logits| fetch_row(logits, is_best[row]));
    }
    fetch_from_device(logits, vocab_size, is_best)
}

/// A row in main memory, or only its best token if that is enough.
fn fetch_row(logits: &[f32], is_best: bool) -> Fetched {
    let best = is_best.then(|| best_token(logits).ok()).flatten();
    // The sampler reports the error of a row without a best token.
    best.map_or_else(|| Fetched::Logits(logits.to_vec()), Fetched::Best)
}

/// Copies rows in one transfer.
fn copy(logits: &Tensor, vocab_size: usize) -> Result<Vec<Fetched>> {
    let all = logits.flatten_all()?.to_vec1::<f32>()?;
    Ok(all
        .chunks(vocab_size.max(1))
        .map(|row| Fetched::Logits(row.to_vec()))
        .collect())
}

fn fetch_from_device(logits: &Tensor, vocab_size: usize, is_best: &[bool]) -> Result<Vec<Fetched>> {
    let of = |wanted: bool| {
        (0u32..)
            .zip(is_best)
            .filter(move |(_, best)| **best == wanted)
            .map(|(row, _)| row)
    };
    let (best, whole): (Vec<u32>, Vec<u32>) = (of(true).collect(), of(false).collect());
    let best = if best.is_empty() {
        Vec::new()
    } else {
        find_best(&select(logits, &best)?)?
    };
    let mut best = best.into_iter();
    let whole = if whole.is_empty() {
        Vec::new()
    } else {
        copy(&select(logits, &whole)?, vocab_size)?
    };
    let mut whole = whole.into_iter();
    let next = |is_best: &bool| if *is_best { best.next() } else { whole.next() };
    let fetched: Option<Vec<Fetched>> = is_best.iter().map(next).collect();
    fetched.ok_or_else(|| candle_core::Error::Msg("rows of logits are missing".into()))
}

fn select(logits: &Tensor, rows: &[u32]) -> Result<Tensor> {
    if rows.len() == logits.dim(0)? {
        return Ok(logits.clone());
    }
    logits.index_select(&Tensor::from_slice(rows, rows.len(), logits.device())?, 0)
}

fn find_best(logits: &Tensor) -> Result<Vec<Fetched>> {
    let places = if kernels::can_choose(logits.device()) {
        kernels::best(logits)?
    } else {
        best_by_tensors(logits)?
    };
    let fetched = |place: Option<u32>| place.map_or(Fetched::NotFinite, Fetched::Best);
    Ok(places.into_iter().map(fetched).collect())
}

/// The index of each row's largest logit, for devices without our kernel; `None` for a row with a NaN or an infinity. Such a row
/// has a sum that is not finite, while finite logits are too small to overflow it.
fn best_by_tensors(logits: &Tensor) -> Result<Vec<Option<u32>>> {
    let best = logits.argmax(D::Minus1)?.to_vec1::<u32>()?;
    let sums = logits.sum(D::Minus1)?.to_vec1::<f32>()?;
    let found = best.into_iter().zip(sums);
    Ok(found
        .map(|(place, sum)| sum.is_finite().then_some(place))
        .collect())
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    fn logits() -> Tensor {
        let rows = [
            [0.0, 3.0, 1.0],
            [f32::NAN, 1.0, 2.0],
            [5.0, 4.0, 6.0],
            [9.0, 8.0, 7.0],
        ];
        Tensor::new(&rows, &Device::Cpu).unwrap()
    }

    #[test]
    fn a_device_finds_the_best_tokens_and_gives_the_other_rows_whole() {
        let fetched = fetch_from_device(&logits(), 3, &[true, true, false, true]).unwrap();
        let [
            Fetched::Best(1),
            Fetched::NotFinite,
            Fetched::Logits(row),
            Fetched::Best(0),
        ] = fetched.as_slice()
        else {
            panic!("{fetched:?}")
        };
        assert_eq!(row, &[5.0, 4.0, 6.0]);
    }

    #[test]
    fn a_device_gives_rows_whole_where_nothing_else_is_asked() {
        let fetched = fetch_from_device(&logits(), 3, &[false; 4]).unwrap();
        assert!(
            fetched
                .iter()
                .all(|row| matches!(row, Fetched::Logits(row) if row.len() == 3))
        );
    }

    #[test]
    fn a_device_chooses_as_the_sampler_does_among_equals_too() {
        use genset_backend_common::GenerateRequest;
        use genset_sampling::Sampler;
        const VOCAB_SIZE: usize = 700;
        // Few distinct values, so that the best occurs many times.
        let rows: Vec<Vec<f32>> = (0..40u32)
            .map(|row| {
                let number = |place: u32| (row * 7919 + place * place * 31) % 97 / 7;
                (0..VOCAB_SIZE)
                    .map(|place| number(u32::try_from(place).unwrap()) as f32 - 6.0)
                    .collect()
            })
            .collect();
        let logits = Tensor::new(rows.clone(), &Device::Cpu).unwrap();
        let by_tensors = best_by_tensors(&logits).unwrap();
        let fetched = fetch_from_device(&logits, VOCAB_SIZE, &[true; 40]).unwrap();
        let mut sampler =
            Sampler::try_new(&GenerateRequest::from_tokens("m", vec![1]), VOCAB_SIZE, 0).unwrap();
        assert!(sampler.is_argmax());
        for ((mut row, by_tensors), fetched) in rows.into_iter().zip(by_tensors).zip(fetched) {
            let want = sampler.sample(&mut row, None).unwrap().token;
            assert_eq!(by_tensors, Some(want));
            assert!(
                matches!(fetched, Fetched::Best(token) if token == want),
                "{fetched:?}"
            );
        }
    }

    #[test]
    fn rows_that_were_not_asked_for_are_an_error() {
        assert!(fetch(&logits(), &[true]).is_err());
    }

    #[test]
    fn main_memory_gives_whole_what_is_asked_for_and_what_has_no_best_token() {
        let fetched = fetch(&logits(), &[true, true, false, true]).unwrap();
        let [
            Fetched::Best(1),
            Fetched::Logits(odd),
            Fetched::Logits(asked),
            Fetched::Best(0),
        ] = fetched.as_slice()
        else {
            panic!("{fetched:?}")
        };
        assert!(odd[0].is_nan());
        assert_eq!(asked, &[5.0, 4.0, 6.0]);
    }
}
