//! `genset simulate`: a small, repeatable run.

use serde_json::Value;

use crate::support::run;

const SMALL: [&str; 7] = [
    "simulate",
    "--workers=4",
    "--requests=200",
    "--rate=2",
    "--seed=7",
    "--policies=round-robin,least-loaded,oracle",
    "--json",
];

#[tokio::test]
async fn a_small_run_gives_the_same_figures_again_and_a_plot() {
    let folder = tempfile::tempdir().unwrap();
    let plot = folder.path().join("ttft.svg").display().to_string();
    let ended = run(&[&SMALL[..], &["--plot", &plot]].concat()).await;
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let again = run(&SMALL).await;
    assert_eq!(again.stdout, ended.stdout, "one seed, two processes");
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!(report["rows"][2]["policy"], "oracle");
    let svg = std::fs::read_to_string(plot).unwrap();
    assert!(
        svg.starts_with("<svg") && svg.matches("<polyline").count() == 3,
        "{svg}"
    );
}

#[tokio::test]
async fn a_table_is_for_people_and_what_is_wrong_is_named() {
    let table = run(&["simulate", "--requests=20", "--policies=random"]).await;
    assert!(
        table.stdout.contains("TTFT p50") && table.stdout.contains("random"),
        "{table:?}"
    );
    let cases: [(&[&str], &str); 7] = [
        (&["--policies=best"], "--policies"),
        (&["--rate=0"], "--rate"),
        (&["--rate=1e-19"], "--rate"),
        (
            &["--load=single", "--input-tokens=4000000000"],
            "--input-tokens",
        ),
        (&["--trace=/no/such/file"], "--trace"),
        (&["--faults=/no/such/file"], "--faults"),
        (
            &["--extra-engine-args=/no/such/file"],
            "--extra-engine-args",
        ),
    ];
    for (flags, expected) in cases {
        let ended = run(&[&["simulate"][..], flags].concat()).await;
        ended.fails(2, expected);
    }
}
