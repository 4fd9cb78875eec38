//! What the benchmarks of the binary share: its processes, the load they are put under, and numbers for people.

pub(crate) mod load;
pub(crate) mod process;

/// How many a second.
pub(crate) fn per(count: u64, seconds: f64) -> f64 {
    (count as f64 / seconds).round()
}

pub(crate) fn round(value: f64, digits: f64) -> f64 {
    (value * digits).round() / digits
}

/// The machine, in words.
pub(crate) fn hardware() -> String {
    let cpus = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpus
        .lines()
        .find_map(|line| line.strip_prefix("model name"));
    let model = model
        .unwrap_or_default()
        .trim_start_matches([' ', '\t', ':']);
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    format!("{cores} cores, {model}")
}
