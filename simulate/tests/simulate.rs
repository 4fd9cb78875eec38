//! Small fleets: invariants of every run, and the effect of better choices.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use genset_engine_mocker::MockerArgs;
use genset_router::KvConfig;
use genset_simulate::{
    Fault, Kind, Load, Plan, Report, Row, Synthetic, simulate, simulate_counted,
};

fn plan(policies: &[&str]) -> Plan {
    Plan {
        workers: 4,
        frontends: 1,
        engine: MockerArgs {
            num_gpu_blocks: 8192,
            ..MockerArgs::default()
        },
        load: Load::Synthetic(Synthetic {
            kind: Kind::Chat,
            sessions_per_s: 2.0,
            requests: 300,
        }),
        faults: Vec::new(),
        policies: policies.iter().map(|name| name.parse().unwrap()).collect(),
        prefill_workers: vec![0],
        kv: KvConfig::default(),
        seed: 1,
    }
}

/// Simulates a plan with the faults of a script.
fn run(script: &str, plan: Plan) -> Report {
    let faults = Fault::read_script(script, plan.workers, plan.frontends).unwrap();
    simulate(&Plan { faults, ..plan }).unwrap()
}

fn row<'a>(report: &'a Report, policy: &str) -> &'a Row {
    let mut rows = report.rows.iter();
    rows.find(|row| row.policy == policy).unwrap()
}

#[test]
fn one_seed_gives_the_same_bytes_and_another_does_not() {
    let plan = plan(&["round-robin", "random", "least-loaded", "oracle"]);
    let first = simulate(&plan).unwrap();
    let ended: Arc<AtomicU64> = Arc::default();
    let second = simulate_counted(&plan, &ended).unwrap();
    assert_eq!(ended.load(Ordering::Relaxed), 4 * 300);
    assert_eq!(plan.requests().unwrap(), 4 * 300);
    assert_eq!(first.json(), second.json());
    assert_eq!(first.svg(), second.svg());
    let other = simulate(&Plan { seed: 2, ..plan }).unwrap();
    assert!(first.json() != other.json());
    for row in &first.rows {
        assert_eq!((row.requests, row.lost_requests()), (300, 0), "{first}");
        assert!(
            row.tokens_per_s > 0.0 && row.itl_p50_ms > Some(5.0),
            "{first}"
        );
    }
}

#[test]
fn who_knows_the_caches_answers_sooner() {
    let report = simulate(&plan(&["round-robin", "oracle"])).unwrap();
    let (blind, knowing) = (row(&report, "round-robin"), row(&report, "oracle"));
    assert!(knowing.hit_rate > blind.hit_rate + 0.1, "{report}");
    assert!(
        knowing.ttft_p50_ms.unwrap() * 1.5 < blind.ttft_p50_ms.unwrap(),
        "{report}"
    );
}

#[test]
fn faults_happen_and_what_they_cost_is_counted() {
    let script = r#"[
        {"at_s": 20, "worker": 0, "do": "crash"},
        {"at_s": 30, "worker": 1, "do": "stop"},
        {"at_s": 40, "worker": 0, "do": "start"},
        {"at_s": 50, "worker": 2, "do": "start"}
    ]"#;
    let report = run(script, plan(&["round-robin"]));
    let row = row(&report, "round-robin");
    // Requests of the crashed worker fail if nothing migrates them.
    assert!(row.lost_requests() + row.moved > 0, "{report}");
    assert!(row.lost_requests() < 20, "{report}");
    let again = run(script, plan(&["round-robin"]));
    assert_eq!(report.json(), again.json());
}

/// Prompts do not wait for answers, and few prefill workers have much of each prompt cached.
#[test]
fn fleets_with_prefill_and_decode_apart_are_compared() {
    let compared = Plan {
        prefill_workers: vec![0, 1, 2],
        ..plan(&["round-robin", "random"])
    };
    let report = simulate(&compared).unwrap();
    let names: Vec<&str> = report.rows.iter().map(|row| row.policy.as_str()).collect();
    let expected = [
        "round-robin",
        "round-robin 1+3",
        "round-robin 2+2",
        "random",
    ];
    assert_eq!(names, expected);
    for row in &report.rows {
        assert_eq!((row.requests, row.lost_requests()), (300, 0), "{report}");
    }
    let (whole, apart) = (&report.rows[0], &report.rows[1]);
    assert!(apart.ttft_p50_ms < whole.ttft_p50_ms, "{report}");
    assert_eq!(simulate(&compared).unwrap().json(), report.json());
}

/// Requests of 600 tokens at these milliseconds after the first; their answers of 2000 tokens take more than ten seconds.
fn long_answers(at_ms: &[u64]) -> Load {
    let line = |at: &u64| {
        format!(
            r#"{{"timestamp": {at}, "input_length": 600, "output_length": 2000, "hash_ids": [1, {at}]}}"#
        )
    };
    let lines: Vec<String> = at_ms.iter().map(line).collect();
    Load::read_trace(&lines.join("\n"), 100).unwrap()
}

/// The handover is a pause in the answer: the blocks of 600 tokens take 9.8 ms at 64 Gbit/s, and the steps for the prompt's last
/// token and for the answer's second one 6 ms each. It contains no prefill.
#[test]
fn a_handover_takes_the_time_of_its_blocks_and_of_two_steps() {
    let compared = Plan {
        workers: 2,
        prefill_workers: vec![0, 1],
        load: long_answers(&[0]),
        ..plan(&["round-robin"])
    };
    let report = simulate(&compared).unwrap();
    let pause = |policy| {
        let pauses = row(&report, policy).over_time.iter();
        let pauses = pauses.map(|moment| moment.longest_pause_ms);
        pauses.fold(0.0, f64::max)
    };
    let (whole, apart) = (pause("round-robin"), pause("round-robin 1+1"));
    assert!(whole < 9.0, "{whole}");
    assert!((20.0..27.0).contains(&apart), "{apart}");
}

#[test]
fn a_request_that_moves_counts_once_with_prefill_and_decode_apart() {
    // Without the prefill worker, the decode worker that takes the request computes its prompt.
    for script in [
        r#"[{"at_s": 5, "worker": 1, "do": "crash"}]"#,
        r#"[{"at_s": 4, "worker": 0, "do": "crash"}, {"at_s": 5, "worker": 1, "do": "crash"}]"#,
    ] {
        let troubled = Plan {
            workers: 3,
            prefill_workers: vec![1],
            load: long_answers(&[0, 500]),
            ..plan(&["round-robin"])
        };
        let report = run(script, troubled);
        // Each of the two decode workers has one of the requests.
        let row = row(&report, "round-robin 1+2");
        assert_eq!((row.requests, row.lost_requests()), (2, 0), "{report}");
        assert_eq!(row.moved, 1, "{report}");
    }
}

/// A worker that is restarted drains first. The next fault still happens on time.
#[test]
fn faults_of_others_do_not_wait_for_a_worker_that_drains() {
    let script = r#"[
        {"at_s": 20, "worker": 0, "do": "start"},
        {"at_s": 20.5, "worker": 1, "do": "crash"}
    ]"#;
    let troubled = Plan {
        engine: MockerArgs {
            speedup_ratio: 0.25,
            ..plan(&[]).engine
        },
        ..plan(&["least-loaded"])
    };
    let report = run(script, troubled);
    let row = row(&report, "least-loaded");
    assert!(row.moved > 0, "{report}");
    let pauses = row.over_time.iter();
    let longest = pauses.max_by(|a, b| a.longest_pause_ms.total_cmp(&b.longest_pause_ms));
    let at_s = longest.unwrap().at_s;
    assert!((20.0..23.0).contains(&at_s), "{at_s}");
}

/// A worker that is restarted still exists while it drains, and faults affect it.
#[test]
fn a_worker_that_drains_to_start_again_may_still_crash() {
    let serve = |faults: &str| {
        let troubled = Plan {
            workers: 2,
            load: long_answers(&[0, 500]),
            ..plan(&["round-robin"])
        };
        let report = run(faults, troubled);
        let row = row(&report, "round-robin");
        assert_eq!((row.requests, row.lost_requests()), (2, 0), "{report}");
        row.moved
    };
    let start = r#"{"at_s": 2, "worker": 0, "do": "start"}"#;
    assert_eq!(serve(&format!("[{start}]")), 0, "it drains");
    let again = r#"{"at_s": 3, "worker": 0, "do": "start"}"#;
    assert_eq!(serve(&format!("[{start}, {again}]")), 0, "it drains once");
    let crash = r#"{"at_s": 4, "worker": 0, "do": "crash"}"#;
    assert_eq!(serve(&format!("[{start}, {crash}]")), 1);
}

/// While there is no worker, a starting frontend looks for one, for a second.
#[test]
fn faults_of_others_do_not_wait_for_a_frontend_that_finds_no_worker() {
    let script = r#"[
        {"at_s": 5, "worker": 0, "do": "crash"},
        {"at_s": 5.05, "frontend": 0, "do": "restart"},
        {"at_s": 5.06, "frontend": 0, "do": "restart"},
        {"at_s": 5.07, "frontend": 0, "do": "restart"},
        {"at_s": 5.1, "worker": 0, "do": "start"}
    ]"#;
    let troubled = Plan {
        workers: 1,
        load: long_answers(&[0]),
        ..plan(&["round-robin"])
    };
    let report = run(script, troubled);
    let row = row(&report, "round-robin");
    assert!(row.moved > 0 && row.lost_requests() == 0, "{report}");
    let pauses = row.over_time.iter().map(|moment| moment.longest_pause_ms);
    let longest = pauses.fold(0.0, f64::max);
    assert!(longest < 2000.0, "{longest}");
}

/// Otherwise a policy would lose what another one moves, and end those conversations.
#[test]
fn answers_of_lost_workers_move_with_every_policy() {
    let script = r#"[
        {"at_s": 4, "worker": 0, "do": "crash"},
        {"at_s": 5, "worker": 0, "do": "start"},
        {"at_s": 7, "worker": 1, "do": "crash"}
    ]"#;
    let troubled = Plan {
        workers: 2,
        load: long_answers(&[0, 500]),
        ..plan(&["round-robin", "random", "oracle"])
    };
    let report = run(script, troubled);
    for row in &report.rows {
        assert_eq!((row.requests, row.lost_requests()), (2, 0), "{report}");
        // Each worker crashes while the answers last.
        assert!(row.moved >= 2, "{report}");
    }
}

#[test]
fn a_plot_shows_a_worker_dying() {
    let script = r#"[
        {"at_s": 20, "worker": 0, "do": "crash"},
        {"at_s": 60, "worker": 0, "do": "start"}
    ]"#;
    let report = run(script, plan(&["least-loaded"]));
    let row = row(&report, "least-loaded");
    assert!(row.moved > 0 && row.lost_requests() == 0, "{report}");
    // An answer that migrated paused, and no other did.
    let pause = |from: f64, to: f64| {
        let between = row.over_time.iter();
        let between = between.filter(|moment| (from..to).contains(&moment.at_s));
        between
            .map(|moment| moment.longest_pause_ms)
            .fold(0.0, f64::max)
    };
    assert!(pause(20.0, 22.0) > pause(10.0, 20.0), "{:?}", row.over_time);
    let svg = report.svg();
    for label in ["worker 0: crash", "worker 0: start", "longest pause"] {
        assert!(svg.contains(label), "{svg}");
    }
}

#[test]
fn a_trace_is_served_as_it_was_recorded() {
    let lines: Vec<String> = (0..40)
        .map(|number| {
            format!(
                r#"{{"timestamp": {}, "input_length": 1400, "output_length": 20, "hash_ids": [{}, 1, {number}]}}"#,
                number * 250,
                number % 2,
            )
        })
        .collect();
    let plan = Plan {
        load: Load::read_trace(&lines.join("\n"), 30).unwrap(),
        ..plan(&["least-loaded"])
    };
    let report = simulate(&plan).unwrap();
    let row = row(&report, "least-loaded");
    assert_eq!((row.requests, row.lost_requests()), (30, 0));
    assert!(row.hit_rate > 0.3, "{report}");
    assert!((7.0..9.0).contains(&row.duration_s), "{report}");
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let error = simulate(&Plan {
        workers: 0,
        ..plan(&["random"])
    })
    .unwrap_err();
    assert!(error.to_string().contains("--workers"), "{error}");
    let error = simulate(&Plan {
        frontends: 0,
        ..plan(&["random"])
    });
    let error = error.unwrap_err().to_string();
    assert!(error.contains("--frontends"), "{error}");
    for (policy, prefill_workers) in [("round-robin", 4), ("oracle", 1)] {
        let error = simulate(&Plan {
            prefill_workers: vec![prefill_workers],
            ..plan(&[policy])
        });
        let error = error.unwrap_err().to_string();
        assert!(error.contains("--prefill-workers"), "{error}");
    }
    for (name, expected) in [("power-of-two", "without a seed"), ("best", "round-robin")] {
        let error = name.parse::<genset_simulate::Policy>().unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// The figures of a small run, as recorded. If a change of scheduler, mocker, worker or router changes a figure, it must be
/// intended: check the difference, then record it with `GENSET_GOLDEN=write cargo test -p genset-simulate`.
#[test]
fn a_small_run_gives_the_recorded_figures() {
    let plan = Plan {
        seed: 7,
        ..plan(&["round-robin", "random", "oracle"])
    };
    let report = simulate(&plan).unwrap();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden.txt");
    if std::env::var_os("GENSET_GOLDEN").is_some_and(|value| value == "write") {
        std::fs::write(path, report.to_string()).unwrap();
    }
    let golden = std::fs::read_to_string(path).unwrap();
    assert!(
        report.to_string() == golden,
        "{report}\nrecorded:\n{golden}"
    );
}

#[test]
fn a_choice_that_looks_at_no_cache_finds_less_in_them() {
    let hit_rate = |weight: f64| {
        let plan = Plan {
            kv: KvConfig {
                overlap_score_weight: weight,
                ..KvConfig::default()
            },
            ..plan(&["kv"])
        };
        row(&simulate(&plan).unwrap(), "kv").hit_rate
    };
    let (blind, knowing) = (hit_rate(0.0), hit_rate(1.0));
    assert!(knowing > blind + 0.1, "{knowing} against {blind}");
}

#[test]
fn several_frontends_serve_one_fleet_the_same_way_again() {
    let plan = Plan {
        frontends: 3,
        ..plan(&["round-robin", "kv", "oracle"])
    };
    let report = simulate(&plan).unwrap();
    for row in &report.rows {
        assert_eq!((row.requests, row.lost_requests()), (300, 0), "{report}");
    }
    assert!(
        row(&report, "kv").hit_rate > row(&report, "round-robin").hit_rate + 0.1,
        "{report}"
    );
    assert_eq!(simulate(&plan).unwrap().json(), report.json());
}

/// Each has its own index, and learns of the others' requests from what workers publish.
#[test]
fn three_frontends_find_as_much_in_the_caches_as_one() {
    let serve = |frontends| {
        let plan = Plan {
            workers: 16,
            frontends,
            engine: MockerArgs {
                max_num_seqs: 8,
                ..MockerArgs::default()
            },
            load: Load::Synthetic(Synthetic {
                kind: Kind::Chat,
                sessions_per_s: 24.0,
                requests: 800,
            }),
            ..plan(&["kv"])
        };
        simulate(&plan).unwrap()
    };
    let (alone, three) = (serve(1), serve(3));
    let (one, of_three) = (row(&alone, "kv"), row(&three, "kv"));
    assert_eq!((of_three.requests, of_three.lost_requests()), (800, 0));
    assert!(of_three.hit_rate >= one.hit_rate * 0.9, "{alone}{three}");
}

/// A new frontend takes snapshots of the workers' caches and receives their load: a second later it finds as much in the
/// caches as one that has run all the time.
#[test]
fn a_frontend_that_restarts_decides_as_well_as_before_a_second_later() {
    const AT_S: f64 = 60.0;
    let serve = |script: &str| run(script, plan(&["kv"]));
    let script = format!(r#"[{{"at_s": {AT_S}, "frontend": 0, "do": "restart"}}]"#);
    let (undisturbed, restarted) = (serve("[]"), serve(&script));
    let hit_rate_after = |report: &Report| {
        let row = row(report, "kv");
        assert_eq!(row.lost_requests(), 0, "{report}");
        let after = (row.over_time.iter()).filter(|moment| moment.at_s >= AT_S + 1.0);
        let (cached, all) = after.fold((0, 0), |(cached, all), moment| {
            (cached + moment.cached_tokens, all + moment.prompt_tokens)
        });
        f64::from(u32::try_from(cached).unwrap()) / f64::from(u32::try_from(all).unwrap())
    };
    let (before, after) = (hit_rate_after(&undisturbed), hit_rate_after(&restarted));
    assert!(undisturbed.json() != restarted.json(), "nothing happened");
    assert!(after > before * 0.97, "{after} against {before}");
}
