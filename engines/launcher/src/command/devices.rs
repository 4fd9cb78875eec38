//! The visible GPUs of a program that has no flag for the first one.

/// The variable that lists the visible GPUs.
pub(super) const VARIABLE: &str = "CUDA_VISIBLE_DEVICES";

/// The `count` GPUs from index `first` on, in CUDA's numbering; if `seen` lists GPUs, out of those.
///
/// # Errors
/// Fails if `seen` has fewer.
pub(super) fn from(first: u32, count: u32, seen: Option<&str>) -> Result<String, String> {
    let end = first.saturating_add(count);
    let Some(seen) = seen else {
        let gpus: Vec<String> = (first..end).map(|gpu| gpu.to_string()).collect();
        return Ok(gpus.join(","));
    };
    let gpus: Vec<&str> = seen
        .split(',')
        .map(str::trim)
        .filter(|gpu| !gpu.is_empty())
        .collect();
    let place = |gpu: u32| usize::try_from(gpu).unwrap_or(usize::MAX);
    match gpus.get(place(first)..place(end)) {
        Some(ours) => Ok(ours.join(",")),
        None => Err(format!(
            "asks for GPU {first} to {}, but {VARIABLE} has {}: {seen:?}",
            end.saturating_sub(1),
            gpus.len()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_count_among_the_gpus_that_are_seen() {
        assert_eq!(from(2, 1, None).as_deref(), Ok("2"));
        assert_eq!(from(2, 3, None).as_deref(), Ok("2,3,4"));
        assert_eq!(from(1, 2, Some("4, 5,GPU-ab")).as_deref(), Ok("5,GPU-ab"));
        for too_few in ["", "0", "0,1"] {
            let problem = from(1, 2, Some(too_few)).unwrap_err();
            assert!(problem.contains("GPU 1 to 2"), "{problem}");
        }
        from(u32::MAX, 2, Some("0")).unwrap_err();
    }
}
