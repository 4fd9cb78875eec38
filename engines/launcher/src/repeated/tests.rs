use super::*;

/// What `/metrics` shows for a vLLM's metrics, without its last line.
fn shown(metrics: &str) -> Vec<String> {
    let registry = MetricsRegistry::default();
    let repeated = Repeated::registered(Dialect::Vllm, &registry);
    repeated.unwrap().tell(metrics);
    assert_eq!(registry.encode_public(), "# EOF\n");
    let text = registry.encode();
    let text = text.strip_suffix("# EOF\n").unwrap();
    text.lines().map(str::to_owned).collect()
}

#[test]
fn families_keep_their_names_and_their_labels() {
    let metrics = r#"# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \"b\""} 2.0
vllm:num_requests_running{engine="1",model_name="a \"b\""} 3.0
# HELP vllm:prompt_tokens_total Prefill tokens.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0"} 8.128902e+06
# HELP vllm:prompt_tokens_created Prefill tokens.
# TYPE vllm:prompt_tokens_created gauge
vllm:prompt_tokens_created{engine="0"} 1.79e+09
# HELP vllm:ttft_seconds Time to the first token.
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_sum{engine="0"} 4.5
vllm:ttft_seconds_bucket{engine="0",le="0.5"} 2.0
vllm:ttft_seconds_bucket{engine="0",le="1.0"} 5.0
vllm:ttft_seconds_bucket{engine="0",le="+Inf"} 6.0
vllm:ttft_seconds_count{engine="0"} 6.0
"#;
    let expected = r#"# HELP vllm:num_requests_running Number of requests.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \"b\""} 2.0
vllm:num_requests_running{engine="1",model_name="a \"b\""} 3.0
# HELP vllm:prompt_tokens Prefill tokens.
# TYPE vllm:prompt_tokens counter
vllm:prompt_tokens_total{engine="0"} 8128902.0
# HELP vllm:ttft_seconds Time to the first token.
# TYPE vllm:ttft_seconds histogram
vllm:ttft_seconds_sum{engine="0"} 4.5
vllm:ttft_seconds_count{engine="0"} 6
vllm:ttft_seconds_bucket{le="0.5",engine="0"} 2
vllm:ttft_seconds_bucket{le="1.0",engine="0"} 5
vllm:ttft_seconds_bucket{le="+Inf",engine="0"} 6
"#;
    assert_eq!(shown(metrics), expected.lines().collect::<Vec<_>>());
    // The output is a fixed point.
    assert_eq!(shown(expected), shown(metrics));
}

#[test]
fn what_is_not_named_after_the_server_has_a_label_that_names_it() {
    let metrics = "# TYPE process_open_fds gauge\nprocess_open_fds 7\n\
                   # TYPE http_size_bytes summary\nhttp_size_bytes_count{server=\"own\"} 2\nhttp_size_bytes_sum{} 5\n";
    let lines = shown(metrics);
    for line in [
        "process_open_fds{server=\"vllm\"} 7.0",
        "http_size_bytes_count{server=\"own\"} 2.0",
        "http_size_bytes_sum{server=\"vllm\"} 5.0",
        "# TYPE http_size_bytes_sum gauge",
    ] {
        assert!(lines.iter().any(|shown| shown == line), "{line}\n{lines:?}");
    }
}

#[test]
fn no_name_is_of_two_families_and_none_is_ours() {
    let metrics = "# TYPE vllm:a_total counter\nvllm:a_total 1\nvllm:a 2\nvllm:a_created 3\n\
                   # TYPE vllm:b histogram\nvllm:b_bucket{le=\"+Inf\"} 1\nvllm:b 2\n\
                   genset_worker_ready 0\n# TYPE vllm:a_total gauge\nvllm:a_total 5\n";
    let lines = shown(metrics);
    let samples: Vec<&str> = lines
        .iter()
        .filter(|line| !line.starts_with('#'))
        .map(String::as_str)
        .collect();
    let expected = [
        "vllm:a_total 1.0",
        "vllm:b_sum 0.0",
        "vllm:b_count 1",
        "vllm:b_bucket{le=\"+Inf\"} 1",
    ];
    assert_eq!(samples, expected);
}

#[test]
fn rates_since_the_last_question_are_left_out() {
    let metrics = "# TYPE llamacpp:prompt_tokens_seconds gauge\nllamacpp:prompt_tokens_seconds 7\n\
                   # TYPE llamacpp:predicted_tokens_seconds gauge\nllamacpp:predicted_tokens_seconds 7\n\
                   # TYPE llamacpp:tokens_predicted_seconds_total counter\nllamacpp:tokens_predicted_seconds_total 7\n";
    let lines = shown(metrics);
    let is_of = |name: &str| lines.iter().any(|line| line.contains(name));
    assert!(
        is_of("llamacpp:tokens_predicted_seconds_total"),
        "{lines:?}"
    );
    assert!(
        !is_of("prompt_tokens") && !is_of("predicted_tokens"),
        "{lines:?}"
    );
}

#[test]
fn hostile_text_leaves_every_line_whole() {
    let metrics = "# HELP vllm:a One\\nbad \r\u{1} line \\\\ two\\\n# TYPE vllm:a gauge\n\
                   vllm:a{x=\"\\n# EOF\\n\",y=\"a\rb\"} 1\nvllm:a{x=\"1\",x=\"2\"} 1\nvllm:a{__name__=\"b\"} 1\n\
                   # EOF\n# TYPE\n# TYPE vllm:c\n# TYPE vllm:c counter\nvllm:c 1\nvllm:c_total NaN\nvllm:c_total -1\n\
                   vllm:d{ 5\n}}\u{0}\"\nvllm:e\u{2028}f 1\nvllm:g{le=\"x\"} NaN\n\
                   # TYPE  histogram\n_bucket{le=\"+Inf\"} 1\n# TYPE _total counter\n_total 1\n";
    let expected = [
        "# HELP _bucket ",
        "# TYPE _bucket gauge",
        r#"_bucket{le="+Inf",server="vllm"} 1.0"#,
        "# HELP _total ",
        "# TYPE _total gauge",
        r#"_total{server="vllm"} 1.0"#,
        r"# HELP vllm:a One bad    line \\ two\\",
        "# TYPE vllm:a gauge",
        r#"vllm:a{x="\n# EOF\n",y="a b"} 1.0"#,
        "# HELP vllm:c ",
        "# TYPE vllm:c gauge",
        "vllm:c 1.0",
        "# HELP vllm:g ",
        "# TYPE vllm:g gauge",
        r#"vllm:g{le="x"} NaN"#,
    ];
    assert_eq!(shown(metrics), expected);
}

#[test]
fn a_histogram_that_makes_no_sense_is_left_out() {
    let histogram = |buckets: &[(&str, &str)]| {
        let line = |(le, count): &(&str, &str)| format!("vllm:h_bucket{{le=\"{le}\"}} {count}\n");
        let lines: String = buckets.iter().map(line).collect();
        shown(&format!("# TYPE vllm:h histogram\n{lines}vllm:h_sum 1\n"))
    };
    assert_eq!(histogram(&[("+Inf", "3"), ("1", "2")]).len(), 6);
    for odd in [
        &[][..],
        &[("1", "2")],
        &[("1", "3"), ("+Inf", "2")],
        &[("1", "2"), ("1.0", "2"), ("+Inf", "3")],
        &[("NaN", "2"), ("+Inf", "3")],
        &[("+Inf", "-1")],
        &[("+Inf", "1e300")],
    ] {
        assert_eq!(histogram(odd), [""; 0], "{odd:?}");
    }
}

#[test]
fn what_is_too_much_is_left_out() {
    let many: String = (0..MAX_SAMPLES + 10)
        .map(|n| format!("vllm:many{{n=\"{n}\"}} 1\n"))
        .collect();
    assert_eq!(shown(&many).len(), MAX_SAMPLES + 2);
    let labels: String = (0..=MAX_LABELS).map(|n| format!("l{n}=\"\",")).collect();
    assert_eq!(shown(&format!("vllm:wide{{{labels}}} 1\n")), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn what_a_server_told_is_forgotten() {
    let registry = MetricsRegistry::default();
    let repeated = Repeated::registered(Dialect::LlamaServer, &registry).unwrap();
    assert_eq!(registry.encode(), "# EOF\n");
    let limit = Duration::from_secs(20);
    let is_shown = || registry.encode().contains("llamacpp:a 1.0");
    repeated.tell("llamacpp:a 1\n");
    tokio::time::advance(Duration::from_secs(19)).await;
    repeated.expire(limit);
    assert!(is_shown());
    tokio::time::advance(Duration::from_secs(1)).await;
    repeated.expire(limit);
    assert!(!is_shown());
    repeated.tell("llamacpp:a 1\n");
    assert!(is_shown());
    repeated.forget();
    assert!(!is_shown());
}
