//! [`Hardware`]: what this process computes with on the CPU, and how fast it reads memory. For the reports of measurements; the
//! engine itself asks nothing here.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use candle_core::Device;
use genset_backend_common::byte_size::ByteSize;
use genset_kernels::{MemoryProbe, isa_name, num_threads};
use tokio::time::Instant;

use crate::cores::{PROCESSORS, allowed, read};
use crate::load::available_memory;

/// The caches of a machine that does not show them, in bytes.
const USUAL_CACHES: u64 = 32 << 20;

/// The memory that is read to measure its rate, in bytes: at least this, and enough that hardly any of it is still in a cache when
/// it is read again.
const LEAST_READ: u64 = 256 << 20;
const MOST_READ: u64 = 2 << 30;
const CACHES_READ: u64 = 4;

/// How often it is read; the median counts.
const READS: usize = 5;

/// What this process computes with on the CPU, once an engine has been started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hardware {
    /// The processor's name, if the system tells it.
    pub processor: Option<String>,
    /// The threads of products.
    pub threads: usize,
    /// The instructions of kernels, by their name as a flag.
    pub isa: &'static str,
    /// Bytes of the last caches of all cores that this process may use, if the system tells them.
    pub cache_bytes: Option<u64>,
}

impl Hardware {
    /// That of this process.
    #[must_use]
    pub fn of_process() -> Self {
        let root = Path::new("/");
        Self {
            processor: processor(root),
            threads: num_threads(),
            isa: isa_name(),
            cache_bytes: cache_bytes(root),
        }
    }

    /// The caches' bytes, or those of a usual machine.
    #[must_use]
    pub fn caches(&self) -> u64 {
        self.cache_bytes.unwrap_or(USUAL_CACHES)
    }

    /// Bytes per second that all threads of products together read from memory, from end to end of more than the caches hold.
    /// `None` without memory for it. Takes up to a few seconds; blocks its thread.
    #[must_use]
    pub fn memory_bytes_per_s(&self) -> Option<f64> {
        let wanted = (self.caches().saturating_mul(CACHES_READ)).clamp(LEAST_READ, MOST_READ);
        let free = available_memory(&Device::Cpu).unwrap_or(u64::MAX);
        if free / 2 < wanted {
            return None;
        }
        let bytes = usize::try_from(wanted).ok()?;
        let probe = MemoryProbe::try_new(bytes).ok()?;
        let mut times: Vec<Duration> = (0..=READS)
            .map(|_| {
                let began = Instant::now();
                std::hint::black_box(probe.read());
                began.elapsed()
            })
            // The first one warms up.
            .skip(1)
            .collect();
        times.sort_unstable();
        let time = times.get(READS / 2)?.as_secs_f64();
        #[expect(clippy::cast_precision_loss, reason = "a rate for people")]
        let rate = wanted as f64 / time;
        Some(rate)
    }
}

/// The name of the first processor.
fn processor(root: &Path) -> Option<String> {
    let text = read(&root.join("proc/cpuinfo"))?;
    let mut names = text.lines().filter_map(|line| {
        let (key, name) = line.split_once(':')?;
        (key.trim() == "model name").then(|| name.trim().to_owned())
    });
    names.next()
}

/// The bytes of the last caches, each of which several processors may share.
fn cache_bytes(root: &Path) -> Option<u64> {
    let caches = allowed(root).into_iter().filter_map(|processor| {
        let caches = root.join(format!("{PROCESSORS}/cpu{processor}/cache"));
        // They are numbered from the first level on.
        let of_number = |number: u32| caches.join(format!("index{number}"));
        let last = (0..8).map(of_number).rfind(|cache| cache.exists())?;
        let size: ByteSize = read(&last.join("size"))?.parse().ok()?;
        Some((read(&last.join("shared_cpu_list"))?, size.0))
    });
    let caches: BTreeMap<String, u64> = caches.collect();
    (!caches.is_empty()).then(|| caches.values().sum())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cores::tests::tree;

    #[test]
    fn caches_that_processors_share_count_once() {
        let mut files = vec![("sys/devices/system/cpu/online".to_owned(), "0-3\n")];
        for (processor, shared) in [(0, "0-1\n"), (1, "0-1\n"), (2, "2-3\n"), (3, "2-3\n")] {
            let cache = format!("{PROCESSORS}/cpu{processor}/cache");
            files.push((format!("{cache}/index2/size"), "1024K\n"));
            files.push((format!("{cache}/index3/size"), "32768K\n"));
            files.push((format!("{cache}/index3/shared_cpu_list"), shared));
        }
        let cpuinfo =
            "processor\t: 0\nmodel name\t: Fast 9\nprocessor\t: 1\nmodel name\t: Fast 9\n";
        files.push(("proc/cpuinfo".to_owned(), cpuinfo));
        let files: Vec<(&str, &str)> = files
            .iter()
            .map(|(path, text)| (path.as_str(), *text))
            .collect();
        let root = tree(&files);
        assert_eq!(cache_bytes(root.path()), Some(64 << 20));
        assert_eq!(processor(root.path()).as_deref(), Some("Fast 9"));
        assert_eq!(cache_bytes(Path::new("/nowhere")), None);
        assert_eq!(processor(Path::new("/nowhere")), None);
    }
}
