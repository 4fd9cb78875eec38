//! Processors, memory, GPUs and the clock.

use std::fs;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use genset_backend_common::machine::{meminfo, usable_memory};
use indicatif::HumanBytes;

use super::finding::Finding;
use super::said;

/// Less free memory than this is too little even for small models, in bytes.
const LITTLE_MEMORY: u64 = 2 << 30;

/// The beginning of 2026 in seconds since 1970: an earlier clock is wrong.
const TOO_EARLY_S: u64 = 1_767_225_600;

pub(super) async fn look() -> Vec<Finding> {
    let (gpus, clock) = tokio::join!(gpus(), clock());
    let mut findings = vec![cores(), instructions(), memory()];
    findings.extend(huge_pages());
    findings.extend(gpus);
    findings.push(clock);
    findings
}

fn cores() -> Finding {
    let usable = std::thread::available_parallelism().map_or(1, usize::from);
    let about = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let all = about
        .lines()
        .filter(|line| line.starts_with("processor"))
        .count();
    let name = about
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let name = name.map_or(String::new(), |(_, name)| format!(", {name}"));
    match all > usable {
        true => Finding::ok(format!(
            "{usable} of {all} cores, the most this process may use{name}"
        )),
        false => Finding::ok(format!("{usable} cores{name}")),
    }
}

#[cfg(target_arch = "x86_64")]
fn instructions() -> Finding {
    let known = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avxvnni", is_x86_feature_detected!("avxvnni")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
    ];
    let found: Vec<&str> = known
        .iter()
        .filter(|(_, is_there)| *is_there)
        .map(|(name, _)| *name)
        .collect();
    let missing: Vec<&str> = known[..3]
        .iter()
        .filter(|(_, is_there)| !is_there)
        .map(|(name, _)| *name)
        .collect();
    if missing.is_empty() {
        return Finding::ok(format!("x86-64 with {}", found.join(", ")));
    }
    let what = format!(
        "x86-64 without {}: out=candle computes several times slower",
        missing.join(", ")
    );
    Finding::warning(
        what,
        "let the virtual machine have the host's processor, or send requests elsewhere with out=dyn",
    )
}

#[cfg(not(target_arch = "x86_64"))]
fn instructions() -> Finding {
    Finding::ok(format!("processor of the kind {}", std::env::consts::ARCH))
}

fn memory() -> Finding {
    let root = Path::new("/");
    let (Some(all), Some(free)) = (meminfo(root, "MemTotal"), meminfo(root, "MemAvailable")) else {
        return Finding::ok("the amount of memory is unknown on this system");
    };
    let limit = usable_memory(root).filter(|limit| *limit < all);
    let limited = limit.map_or(String::new(), |limit| {
        format!(", {} for this control group", HumanBytes(limit))
    });
    let what = format!(
        "{} of memory, {} free{limited}",
        HumanBytes(all),
        HumanBytes(free)
    );
    match free.min(limit.unwrap_or(free)) < LITTLE_MEMORY {
        true => Finding::warning(
            what,
            "end other programs, raise the group's limit, or take a smaller quantization such as ORG/NAME:Q4_K_M",
        ),
        false => Finding::ok(what),
    }
}

fn huge_pages() -> Option<Finding> {
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    let setting = fs::read_to_string(path).ok()?;
    Some(match setting.contains("[never]") {
        true => Finding::warning(
            "huge pages are off: weights are read somewhat slower",
            format!("echo madvise | sudo tee {path}"),
        ),
        false => Finding::ok("huge pages where programs ask for them"),
    })
}

async fn gpus() -> Vec<Finding> {
    let query = [
        "--query-gpu=name,memory.total,driver_version",
        "--format=csv,noheader",
    ];
    let has_device = Path::new("/dev/nvidiactl").exists() || Path::new("/dev/nvidia0").exists();
    let listed = said("nvidia-smi", &query)
        .await
        .filter(|text| !text.is_empty());
    let Some(listed) = listed else {
        return vec![match has_device {
            true => Finding::problem(
                "there is an NVIDIA GPU, and nvidia-smi does not see it",
                "install the driver of the running kernel, or start the container with --gpus all",
            ),
            false => Finding::ok("no NVIDIA GPU: out=candle computes on the processor"),
        }];
    };
    let mut findings: Vec<Finding> = listed
        .lines()
        .map(|line| Finding::ok(format!("GPU {}", line.trim())))
        .collect();
    if !cfg!(feature = "cuda") {
        let what = "this build of genset has no CUDA: out=candle leaves the GPU alone; out=vllm and the other servers use it";
        findings.push(Finding::warning(
            what,
            "cargo install --path cli --features cuda",
        ));
    }
    findings
}

async fn clock() -> Finding {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    if now < TOO_EARLY_S {
        return Finding::problem(
            "the clock is years behind: certificates will seem not to be valid yet",
            "sudo timedatectl set-ntp true",
        );
    }
    match said(
        "timedatectl",
        &["show", "--property=NTPSynchronized", "--value"],
    )
    .await
    .as_deref()
    {
        Some("yes") => Finding::ok("the clock is synchronized"),
        Some("no") => Finding::warning(
            "the clock is not synchronized",
            "sudo timedatectl set-ntp true",
        ),
        Some(_) | None => {
            Finding::ok("the clock is plausible; nothing here says whether it is synchronized")
        }
    }
}
