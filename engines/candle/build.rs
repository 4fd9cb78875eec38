//! Compiles `kernels/` if a feature asks for it: with nvcc for GPUs, or with the C++ compiler for tests on the host.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=kernels");
    println!("cargo::rustc-check-cfg=cfg(kernels_are_emulated)");
    #[cfg(feature = "cuda")]
    for_gpus()?;
    #[cfg(feature = "kernel-emulation")]
    if std::env::var("HOST")? == std::env::var("TARGET")? {
        for_the_host();
        println!("cargo::rustc-cfg=kernels_are_emulated");
    }
    Ok(())
}

/// One PTX module for each number type and one for logits, so that a process loads only what it uses. PTX of `compute_80`
/// runs on every GPU since Ampere: the driver translates it when it loads the module.
#[cfg(feature = "cuda")]
fn for_gpus() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed=NVCC_CCBIN");
    // Finds nvcc as candle's own kernels do.
    let nvcc = cudaforge::CudaToolkit::detect()?.nvcc_path;
    let out = std::path::PathBuf::from(std::env::var("OUT_DIR")?);
    for module in ["BF16", "F16", "F32", "LOGITS"] {
        let mut command = std::process::Command::new(&nvcc);
        command
            .args(["--ptx", "-arch=compute_80", "-std=c++17", "-O3"])
            .arg(format!("-DGENSET_{module}"))
            .arg("kernels/genset.cu")
            .arg("-o")
            .arg(out.join(format!("genset_{module}.ptx")));
        if let Ok(compiler) = std::env::var("NVCC_CCBIN") {
            command.args(["-ccbin", &compiler]);
        }
        let status = command.status()?;
        if !status.success() {
            return Err(format!("{} failed on kernels/genset.cu: {status}", nvcc.display()).into());
        }
    }
    Ok(())
}

#[cfg(feature = "kernel-emulation")]
fn for_the_host() {
    cc::Build::new()
        .cpp(true)
        .std("c++17")
        .opt_level(2)
        // The emulation jumps to the stacks of other fibers, which this check would take for an attack.
        .flag("-U_FORTIFY_SOURCE")
        .flag("-fno-strict-aliasing")
        .flag("-Wno-unknown-pragmas")
        .file("kernels/emulation/run.cpp")
        .compile("genset_emulation");
}
