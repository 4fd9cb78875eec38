//! [`Cores`]: the default number of threads that compute on the CPU. Linux only; elsewhere, or if the kernel shows no
//! processors, it is the standard library's number. `set_threads` uses it before the first product.
//!
//! It is one thread per core, not per hyper-thread: one thread of products keeps a core's units busy, and threads that
//! spin would take them from each other. On hybrid processors only the fast cores count: a step's regions take tens of
//! microseconds each, and end with the slowest thread.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::Path;
use std::str::FromStr;
use std::thread::available_parallelism;

use genset_backend_common::machine::ControlGroup;

/// The default number of threads that compute on this machine's CPU.
#[must_use]
pub fn default_threads() -> usize {
    Cores::of_machine().threads()
}

/// The cores that this process may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cores {
    /// Processors that it may run on; each hyper-thread is one.
    processors: usize,
    /// The number of their cores.
    all: usize,
    /// The cores that get a thread: on hybrid processors the fast ones, else all.
    fast: usize,
    /// The limit of CPU time, in whole processors, if it is less than `processors`.
    limit: Option<usize>,
}

impl Cores {
    /// The cores of this machine.
    pub(crate) fn of_machine() -> Self {
        Self::below(
            Path::new("/"),
            available_parallelism().map_or(1, usize::from),
        )
    }

    /// The cores of the machine whose files are below `root`. `available` is the number that the system reports otherwise.
    fn below(root: &Path, available: usize) -> Self {
        let allowed = allowed(root);
        if allowed.is_empty() {
            return Self {
                processors: available,
                all: available,
                fast: available,
                limit: None,
            };
        }
        let cores = |processors: &BTreeSet<usize>| {
            let cores: BTreeSet<String> = processors
                .iter()
                .map(|&processor| core(root, processor))
                .collect();
            cores.len()
        };
        let limit = available.min(limit(root).unwrap_or(usize::MAX));
        Self {
            processors: allowed.len(),
            all: cores(&allowed),
            fast: cores(&fast(root, &allowed)),
            limit: (limit < allowed.len()).then_some(limit),
        }
    }

    /// The number of threads to compute with.
    pub(crate) fn threads(&self) -> usize {
        self.fast.min(self.limit.unwrap_or(usize::MAX)).max(1)
    }
}

/// Formats the number of threads and its reason.
impl fmt::Display for Cores {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            processors,
            all,
            fast,
            limit,
        } = *self;
        let threads = self.threads();
        let plural = |count: usize| if count == 1 { "" } else { "s" };
        write!(f, "{threads} thread{}: ", plural(threads))?;
        if limit.is_some_and(|limit| limit <= fast) {
            write!(f, "the CPU limit of this process on ")?;
        } else if fast < all {
            write!(f, "{fast} fast of ")?;
        }
        write!(f, "{all} core{}", plural(all))?;
        if processors > all {
            write!(f, " with {processors} hyper-threads")?;
        }
        Ok(())
    }
}

pub(crate) const PROCESSORS: &str = "sys/devices/system/cpu";

/// The processors that are online and that this process may run on; empty if the kernel does not show them.
pub(crate) fn allowed(root: &Path) -> BTreeSet<usize> {
    let online = list(&root.join(PROCESSORS).join("online")).unwrap_or_default();
    let status = read(&root.join("proc/self/status")).unwrap_or_default();
    let affinity = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
        .and_then(processors);
    match affinity {
        Some(affinity) => online.intersection(&affinity).copied().collect(),
        None => online,
    }
}

/// The core of a processor, as the list of its hyper-threads. The file's name changed in Linux 5.3.
fn core(root: &Path, processor: usize) -> String {
    let topology = root.join(format!("{PROCESSORS}/cpu{processor}/topology"));
    let siblings = ["core_cpus_list", "thread_siblings_list"]
        .iter()
        .find_map(|name| read(&topology.join(name)));
    siblings.unwrap_or_else(|| processor.to_string())
}

/// The processors of fast cores: all, if there is one kind or if only slow ones are allowed.
fn fast(root: &Path, allowed: &BTreeSet<usize>) -> BTreeSet<usize> {
    let fast = by_kind(root, allowed).unwrap_or_else(|| by_capacity(root, allowed));
    if fast.is_empty() {
        allowed.clone()
    } else {
        fast
    }
}

/// The fast cores of Intel's hybrid processors.
fn by_kind(root: &Path, allowed: &BTreeSet<usize>) -> Option<BTreeSet<usize>> {
    let kind = |name: &str| list(&root.join("sys/devices").join(name).join("cpus"));
    let (fast, _slow) = (kind("cpu_core")?, kind("cpu_atom")?);
    Some(fast.intersection(allowed).copied().collect())
}

/// The fast cores of ARM's processors. 1024 is the machine's fastest; big cores beside bigger ones count too.
fn by_capacity(root: &Path, allowed: &BTreeSet<usize>) -> BTreeSet<usize> {
    let capacity = |processor: &usize| {
        number::<u64>(&root.join(format!("{PROCESSORS}/cpu{processor}/cpu_capacity")))
    };
    let greatest = allowed.iter().filter_map(capacity).max().unwrap_or(0);
    let is_fast = |processor: &&usize| capacity(processor).is_none_or(|it| 2 * it >= greatest);
    allowed.iter().filter(is_fast).copied().collect()
}

/// The CPU time that the control groups allow, in whole processors, at least 1.
fn limit(root: &Path) -> Option<usize> {
    let groups = ControlGroup::of_process(root, "self", "cpu").into_iter();
    let limits = groups.filter_map(|group| {
        let (quota_us, period_us) = match group {
            ControlGroup::First(folder) => (
                // -1 means no limit.
                number::<u64>(&folder.join("cpu.cfs_quota_us"))?,
                number::<u64>(&folder.join("cpu.cfs_period_us"))?,
            ),
            ControlGroup::Second(folder) => {
                let text = read(&folder.join("cpu.max"))?;
                let (quota, period) = text.split_once(' ')?;
                (quota.parse().ok()?, period.parse().ok()?)
            }
        };
        usize::try_from(quota_us.checked_div(period_us)?.max(1)).ok()
    });
    limits.min()
}

pub(crate) fn read(path: &Path) -> Option<String> {
    Some(fs::read_to_string(path).ok()?.trim().to_owned())
}

fn number<T: FromStr>(path: &Path) -> Option<T> {
    read(path)?.parse().ok()
}

fn list(path: &Path) -> Option<BTreeSet<usize>> {
    processors(&read(path)?)
}

/// Parses the kernel's list format: `0-3,8`.
fn processors(list: &str) -> Option<BTreeSet<usize>> {
    let ranges = list.trim().split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        Some(first..=last)
    });
    let ranges: Vec<_> = ranges.collect::<Option<_>>()?;
    Some(ranges.into_iter().flatten().collect())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A root with these files.
    pub(crate) fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        root
    }

    /// Checks the threads and the reason for a machine with these files.
    #[track_caller]
    fn check(files: &[(String, String)], available: usize, expected: &str) {
        let texts = files
            .iter()
            .map(|(path, text)| (path.as_str(), text.as_str()));
        let root = tree(&texts.collect::<Vec<_>>());
        let cores = Cores::below(root.path(), available);
        assert_eq!(cores.to_string(), expected, "{files:?}");
        let threads = expected.split(' ').next().unwrap();
        assert_eq!(cores.threads().to_string(), threads);
    }

    const ONLINE: &str = "sys/devices/system/cpu/online";
    const SIBLINGS: &str = "topology/core_cpus_list";

    /// The files of a machine: a file of this name for each processor in turn, with these lines, and `files`.
    fn machine(name: &str, lines: &[&str], files: &[(&str, &str)]) -> Vec<(String, String)> {
        let lines = (0..).zip(lines).map(|(cpu, line)| {
            let path = format!("sys/devices/system/cpu/cpu{cpu}/{name}");
            (path, format!("{line}\n"))
        });
        let owned = |(path, text): &(&str, &str)| ((*path).to_owned(), (*text).to_owned());
        lines.chain(files.iter().map(owned)).collect()
    }

    /// A machine with hyper-threads, the second ones numbered after all first ones, with `files` added.
    fn hyper_threaded(files: &[(&str, &str)]) -> Vec<(String, String)> {
        let lines = ["0,4", "1,5", "2,6", "3,7", "0,4", "1,5", "2,6", "3,7"];
        machine(
            SIBLINGS,
            &lines,
            &[&[(ONLINE, "0-7\n")][..], files].concat(),
        )
    }

    #[test]
    fn a_core_is_worth_one_thread_whatever_its_hyper_threads() {
        let whole = hyper_threaded(&[]);
        check(&whole, 8, "4 threads: 4 cores with 8 hyper-threads");
        // Linux also lists processors that might be added later.
        let all = ("proc/self/status", "Name:\tx\nCpus_allowed_list:\t0-127\n");
        check(
            &hyper_threaded(&[all]),
            8,
            "4 threads: 4 cores with 8 hyper-threads",
        );
    }

    #[test]
    fn the_name_of_the_hyper_threads_before_linux_5_3_is_known() {
        let online = [(ONLINE, "0-1\n")];
        let files = machine("topology/thread_siblings_list", &["0-1"; 2], &online);
        check(&files, 2, "1 thread: 1 core with 2 hyper-threads");
    }

    #[test]
    fn affinity_leaves_cores_out() {
        for (affinity, expected) in [
            // Both hyper-threads of two cores; one hyper-thread of each of four cores.
            ("0-1,4-5", "2 threads: 2 cores with 4 hyper-threads"),
            ("4-7", "4 threads: 4 cores"),
            ("2", "1 thread: 1 core"),
        ] {
            let status = format!("Cpus_allowed_list:\t{affinity}\n");
            let files = hyper_threaded(&[("proc/self/status", &status)]);
            let available = processors(affinity).unwrap().len();
            check(&files, available, expected);
        }
    }

    #[test]
    fn of_two_kinds_of_intels_cores_the_performance_cores_count() {
        // Two performance cores with two hyper-threads each, four efficiency cores.
        let with = |files: &[(&str, &str)]| {
            let kinds = [
                (ONLINE, "0-7\n"),
                ("sys/devices/cpu_core/cpus", "0-3\n"),
                ("sys/devices/cpu_atom/cpus", "4-7\n"),
            ];
            let lines = ["0-1", "0-1", "2-3", "2-3", "4", "5", "6", "7"];
            machine(SIBLINGS, &lines, &[&kinds[..], files].concat())
        };
        let fast = "2 threads: 2 fast of 6 cores with 8 hyper-threads";
        check(&with(&[]), 8, fast);
        // A process that may only use efficiency cores computes with them.
        let status = [("proc/self/status", "Cpus_allowed_list:\t4-7\n")];
        check(&with(&status), 4, "4 threads: 4 cores");
    }

    #[test]
    fn of_arms_cores_those_of_half_the_capacity_count() {
        let capacities = ["250", "250", "250", "250", "800", "800", "800", "1024"];
        let files = machine("cpu_capacity", &capacities, &[(ONLINE, "0-7\n")]);
        check(&files, 8, "4 threads: 4 fast of 8 cores");
    }

    #[test]
    fn the_control_groups_limit_counts_in_whole_processors() {
        let cgroup = ("proc/self/cgroup", "0::/pod/box\n");
        let own = |max| [cgroup, ("sys/fs/cgroup/pod/box/cpu.max", max)];
        let limited = "1 thread: the CPU limit of this process on 4 cores with 8 hyper-threads";
        check(&hyper_threaded(&own("150000 100000\n")), 8, limited);
        check(&hyper_threaded(&own("50000 100000\n")), 8, limited);
        // More than the cores, whose number is then the bound.
        let cores = "4 threads: 4 cores with 8 hyper-threads";
        check(&hyper_threaded(&own("600000 100000\n")), 6, cores);
        check(&hyper_threaded(&own("max 100000\n")), 8, cores);
        check(&hyper_threaded(&own("1 0\n")), 8, cores);
        let above = [cgroup, ("sys/fs/cgroup/pod/cpu.max", "200000 100000\n")];
        let two = "2 threads: the CPU limit of this process on 4 cores with 8 hyper-threads";
        check(&hyper_threaded(&above), 8, two);
        // A limit that only the standard library sees.
        check(&hyper_threaded(&[]), 2, two);
    }

    #[test]
    fn the_first_version_of_control_groups_is_read_too() {
        let files = |quota| {
            [
                ("proc/self/cgroup", "4:cpu,cpuacct:/docker/1\n"),
                // A container sees its own group as the root.
                ("sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota),
                ("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n"),
            ]
        };
        let two = "2 threads: the CPU limit of this process on 4 cores with 8 hyper-threads";
        check(&hyper_threaded(&files("250000\n")), 8, two);
        let cores = "4 threads: 4 cores with 8 hyper-threads";
        check(&hyper_threaded(&files("-1\n")), 8, cores);
    }

    #[test]
    fn where_the_kernel_shows_nothing_the_standard_library_decides() {
        for files in [&[][..], &[(ONLINE, "what\n")]] {
            check(&machine("", &[], files), 6, "6 threads: 6 cores");
        }
        assert!(Cores::of_machine().threads() <= available_parallelism().unwrap().get());
    }
}
