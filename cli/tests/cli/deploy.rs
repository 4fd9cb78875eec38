//! The files under `deploy/`: they parse, this binary accepts every command line in them, and their names, ports and times are
//! consistent.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use serde::Deserialize;
use serde_json::Value;

use crate::metrics::documented;
use crate::support::{genset, repository, run_with};

/// The longest time that a process may take after `--grace`: unlisting, the engine's drain and cleanup, in seconds.
const AFTER_GRACE_S: u64 = 90;

fn files(folder: &str, extension: &str) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(repository(folder)).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut paths: Vec<_> = paths
        .filter(|path| path.extension().is_some_and(|found| found == extension))
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "no {extension} in {folder}");
    paths
}

/// The documents of a YAML file, with their merge keys merged.
fn yaml(path: PathBuf) -> Vec<Value> {
    let text = std::fs::read_to_string(&path).unwrap();
    let documents = serde_norway::Deserializer::from_str(&text).map(|document| {
        let mut value = serde_norway::Value::deserialize(document)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        value.apply_merge().unwrap();
        serde_json::to_value(value).unwrap()
    });
    documents.collect()
}

fn one_yaml(path: &str) -> Value {
    let mut documents = yaml(repository(path));
    assert_eq!(documents.len(), 1, "{path}");
    documents.remove(0)
}

fn manifests() -> Vec<Value> {
    let files = files("deploy/kubernetes", "yaml").into_iter();
    let files = files.filter(|path| !path.ends_with("kustomization.yaml"));
    files.flat_map(yaml).collect()
}

fn of_kind(kinds: &[&str]) -> Vec<Value> {
    let is_one = |manifest: &Value| kinds.iter().any(|kind| manifest["kind"] == *kind);
    manifests().into_iter().filter(is_one).collect()
}

fn list<'a>(value: &'a Value, pointer: &str) -> &'a [Value] {
    let found = value.pointer(pointer).and_then(Value::as_array);
    found.map_or(&[], Vec::as_slice)
}

fn string(value: &Value) -> &str {
    value
        .as_str()
        .unwrap_or_else(|| panic!("{value} is no text"))
}

/// A command line of ours, with its environment.
#[derive(Debug, Default)]
struct Start {
    words: Vec<String>,
    environment: BTreeMap<String, String>,
}

impl Start {
    /// The effective settings, from `--print-config=json`.
    async fn settings(&self) -> Value {
        let mut command = genset(&[]);
        command
            .args(&self.words)
            .arg("--print-config=json")
            .envs(&self.environment);
        let ended = run_with(command, b"").await;
        assert_eq!(ended.code, Some(0), "{self:?}: {}", ended.stderr);
        serde_json::from_str(&ended.stdout).unwrap()
    }
}

fn words(value: &Value) -> Vec<String> {
    let words = value.as_array().expect("a list of words").iter();
    words.map(|word| string(word).to_owned()).collect()
}

/// The command line of a container, with `$(VARIABLE)` and the config map filled in.
fn container_start(container: &Value) -> Start {
    let config = of_kind(&["ConfigMap"]).remove(0);
    let data = config["data"].as_object().unwrap();
    let mut start = Start {
        words: words(&container["args"]),
        environment: data
            .iter()
            .map(|(name, value)| (name.clone(), string(value).to_owned()))
            .collect(),
    };
    for variable in list(container, "/env") {
        let reference = format!("$({})", string(&variable["name"]));
        for word in &mut start.words {
            *word = word.replace(&reference, "10.0.0.7");
        }
    }
    start
}

/// Our containers, each with its pod's template and its workload's name.
fn our_containers() -> Vec<(String, Value, Value)> {
    let mut containers = Vec::new();
    for workload in of_kind(&["Deployment", "StatefulSet"]) {
        let template = &workload["spec"]["template"];
        for container in list(template, "/spec/containers") {
            if string(&container["image"]).starts_with("genset:") {
                let name = string(&workload["metadata"]["name"]).to_owned();
                containers.push((name, template.clone(), container.clone()));
            }
        }
    }
    assert_eq!(containers.len(), 2);
    containers
}

fn setting(settings: &Value, name: &str) -> Value {
    settings[name]["value"].clone()
}

#[tokio::test]
async fn containers_listen_on_the_ports_they_declare_for_everybody() {
    for (workload, _, container) in our_containers() {
        let settings = container_start(&container).settings().await;
        assert!(!list(&container, "/ports").is_empty(), "{workload}");
        for port in list(&container, "/ports") {
            let name = string(&port["name"]);
            let (number, host) = (format!("{name}-port"), format!("{name}-host"));
            assert_eq!(
                setting(&settings, &number),
                port["containerPort"],
                "{workload}"
            );
            assert_eq!(setting(&settings, &host), "0.0.0.0", "{workload}");
        }
    }
}

#[tokio::test]
async fn pods_are_given_the_time_that_draining_takes() {
    for (workload, template, container) in our_containers() {
        let settings = container_start(&container).settings().await;
        let grace = setting(&settings, "grace").as_f64().unwrap();
        let pause = &container["lifecycle"]["preStop"]["exec"]["command"];
        assert_eq!(pause[0], "sleep", "{workload}");
        let pause: f64 = string(&pause[1]).parse().unwrap();
        let given = template["spec"]["terminationGracePeriodSeconds"].as_u64();
        let needed = grace + pause + f64::from(u32::try_from(AFTER_GRACE_S).unwrap());
        let given = f64::from(u32::try_from(given.unwrap()).unwrap());
        assert!(given > needed, "{workload}: {given} <= {needed}");
    }
}

#[test]
fn probes_ask_paths_that_exist_on_ports_that_are_declared() {
    for workload in of_kind(&["Deployment", "StatefulSet"]) {
        let name = string(&workload["metadata"]["name"]);
        for container in list(&workload, "/spec/template/spec/containers") {
            let is_ours = string(&container["image"]).starts_with("genset:");
            let ports: Vec<_> = list(container, "/ports").iter().collect();
            for probe in ["startupProbe", "livenessProbe", "readinessProbe"] {
                let asks = &container[probe]["httpGet"];
                let declared = ports.iter().any(|port| port["name"] == asks["port"]);
                assert!(declared, "{name}: {probe} asks port {}", asks["port"]);
                if is_ours {
                    let path = string(&asks["path"]);
                    let right: &[&str] = match probe {
                        "livenessProbe" => &["/live"],
                        "readinessProbe" => &["/ready"],
                        _ => &["/live", "/ready"],
                    };
                    assert!(right.contains(&path), "{name}: {probe} asks {path}");
                    // On another port, clients may use all connections although the process is healthy.
                    let may_restart = probe != "readinessProbe";
                    assert!(!may_restart || asks["port"] == "status", "{name}: {probe}");
                }
            }
            assert!(container["resources"]["requests"].is_object(), "{name}");
        }
    }
}

#[test]
fn no_pod_may_ask_the_cluster_for_anything() {
    for workload in of_kind(&["Deployment", "StatefulSet"]) {
        let name = &workload["metadata"]["name"];
        let pod = &workload["spec"]["template"]["spec"];
        assert_eq!(pod["automountServiceAccountToken"], false, "{name}");
    }
}

/// A namespace that enforces Kubernetes' standard `restricted` refuses pods that say less.
#[test]
fn every_pod_is_one_that_the_restricted_standard_admits() {
    for workload in of_kind(&["Deployment", "StatefulSet"]) {
        let name = &workload["metadata"]["name"];
        let pod = &workload["spec"]["template"]["spec"];
        let rights = &pod["securityContext"];
        assert_eq!(rights["runAsNonRoot"], true, "{name}");
        assert_eq!(rights["seccompProfile"]["type"], "RuntimeDefault", "{name}");
        for container in list(pod, "/containers") {
            let rights = &container["securityContext"];
            assert_eq!(rights["allowPrivilegeEscalation"], false, "{name}");
            assert_eq!(rights["capabilities"]["drop"][0], "ALL", "{name}");
        }
    }
}

#[test]
fn services_budgets_and_policies_select_pods_and_ports_that_exist() {
    let workloads = of_kind(&["Deployment", "StatefulSet"]);
    let selected = |selector: &Value| -> &Value {
        let labels = |workload: &&Value| {
            workload["spec"]["template"]["metadata"]["labels"] == *selector
                && workload["spec"]["selector"]["matchLabels"] == *selector
        };
        let found = workloads.iter().find(labels);
        found.unwrap_or_else(|| panic!("{selector} selects nothing"))
    };
    for service in of_kind(&["Service"]) {
        let workload = selected(&service["spec"]["selector"]);
        let containers = list(workload, "/spec/template/spec/containers").iter();
        let ports: Vec<_> = containers
            .flat_map(|container| list(container, "/ports"))
            .collect();
        for port in list(&service, "/spec/ports") {
            let is_there = ports
                .iter()
                .any(|found| found["name"] == port["targetPort"]);
            assert!(is_there, "{port}");
        }
    }
    let budgets = of_kind(&["PodDisruptionBudget"]);
    assert_eq!(budgets.len(), 3);
    for budget in &budgets {
        selected(&budget["spec"]["selector"]["matchLabels"]);
    }
    for policy in of_kind(&["NetworkPolicy"]) {
        selected(&policy["spec"]["podSelector"]["matchLabels"]);
    }
}

#[test]
fn every_manifest_is_part_of_the_whole_and_has_a_name() {
    let whole = one_yaml("deploy/kubernetes/kustomization.yaml");
    let listed: BTreeSet<_> = list(&whole, "/resources").iter().map(string).collect();
    let paths = files("deploy/kubernetes", "yaml");
    let names = paths.iter().filter_map(|path| path.file_name()?.to_str());
    let there: BTreeSet<_> = names.filter(|name| *name != "kustomization.yaml").collect();
    assert_eq!(listed, there);
    for manifest in manifests() {
        for pointer in ["/apiVersion", "/kind", "/metadata/name"] {
            let is_text = manifest.pointer(pointer).is_some_and(Value::is_string);
            assert!(is_text, "{pointer} of {manifest}");
        }
    }
}

/// kubectl ends a text in braces at a question mark, unless it is quoted; the parser of these tests does not.
#[test]
fn texts_in_braces_that_have_a_question_mark_are_quoted() {
    for path in files("deploy/kubernetes", "yaml") {
        let manifest = std::fs::read_to_string(&path).unwrap();
        for line in manifest.lines().filter(|line| line.contains('{')) {
            let mut unquoted = line.split('"').step_by(2);
            let is_whole = unquoted.all(|part| !part.contains('?'));
            assert!(is_whole, "{}: {line}", path.display());
        }
    }
}

#[tokio::test]
async fn the_addresses_of_the_config_map_are_services_that_exist() {
    let services = of_kind(&["Service"]);
    let config = of_kind(&["ConfigMap"]).remove(0);
    for (variable, service) in [("ETCD_ENDPOINTS", "etcd"), ("NATS_SERVER", "nats")] {
        let is_it = |found: &&Value| found["metadata"]["name"] == service;
        let found = services.iter().find(is_it).expect(service);
        let port = found["spec"]["ports"][0]["port"].as_u64().unwrap();
        for address in string(&config["data"][variable]).split(',') {
            let (_, host) = address.split_once("://").unwrap();
            let (host, found) = host.rsplit_once(':').unwrap();
            assert_eq!(host.rsplit('.').next(), Some(service));
            assert_eq!(found.parse(), Ok(port), "{address}");
        }
    }
}

/// The default of a compose variable, `${NAME:-default}`.
fn interpolated(text: &str) -> String {
    match (text.strip_prefix("${"), text.strip_suffix('}')) {
        (Some(_), Some(rest)) => rest.split_once(":-").expect("a default").1.to_owned(),
        _ => text.to_owned(),
    }
}

fn compose_starts(compose: &Value) -> BTreeMap<String, Start> {
    let services = compose["services"].as_object().unwrap();
    let ours = services
        .iter()
        .filter(|(_, service)| string(&service["image"]).starts_with("genset:"));
    let starts = ours.map(|(name, service)| {
        let environment = service["environment"].as_object().unwrap().iter();
        let start = Start {
            words: words(&service["command"]),
            environment: environment
                .map(|(name, value)| (name.clone(), interpolated(string(value))))
                .collect(),
        };
        (name.clone(), start)
    });
    starts.collect()
}

#[tokio::test]
async fn the_compose_file_starts_what_fits_together() {
    let compose = one_yaml("deploy/compose.yaml");
    let services = compose["services"].as_object().unwrap();
    for (name, service) in services {
        let needs = service["depends_on"].as_object().into_iter().flatten();
        for (needed, _) in needs {
            assert!(services.contains_key(needed), "{name} needs {needed}");
        }
        for secret in list(service, "/secrets") {
            assert!(compose["secrets"][string(secret)].is_object(), "{secret}");
        }
    }
    let starts = compose_starts(&compose);
    assert_eq!(starts.len(), 3);
    for (name, start) in &starts {
        let settings = start.settings().await;
        assert_eq!(setting(&settings, "status-host"), "0.0.0.0", "{name}");
        if name.starts_with("worker") {
            assert_eq!(setting(&settings, "advertise-host"), **name);
        } else {
            let port = setting(&settings, "http-port");
            let published = format!("127.0.0.1:{port}:{port}");
            assert_eq!(services[name]["ports"][0], published);
        }
    }
    let prometheus = one_yaml("deploy/prometheus/prometheus.yml");
    let jobs = list(&prometheus, "/scrape_configs").iter();
    let targets: BTreeSet<_> = jobs
        .flat_map(|job| list(job, "/static_configs/0/targets"))
        .map(string)
        .collect();
    let mut expected = BTreeSet::new();
    for (name, start) in &starts {
        let port = setting(&start.settings().await, "status-port");
        expected.insert(format!("{name}:{port}"));
    }
    assert_eq!(targets, expected.iter().map(String::as_str).collect());
}

#[tokio::test]
async fn systemd_starts_what_this_binary_takes_and_waits_for_its_end() {
    for path in files("deploy/systemd", "service") {
        let unit = std::fs::read_to_string(&path).unwrap();
        let value = |key: &str| {
            let prefix = format!("{key}=");
            let found = unit.lines().find_map(|line| line.strip_prefix(&prefix));
            found.unwrap_or_else(|| panic!("{}: no {key}", path.display()))
        };
        let line = value("ExecStart").replace("%i", "1").replace("%d", "/run");
        let mut line = line.split(' ').map(str::to_owned);
        assert_eq!(line.next().as_deref(), Some("/usr/local/bin/genset"));
        let start = Start {
            words: line.collect(),
            environment: BTreeMap::new(),
        };
        let settings = start.settings().await;
        let grace = setting(&settings, "grace").as_f64().unwrap();
        let stop: u32 = value("TimeoutStopSec").parse().unwrap();
        let needed = grace + f64::from(u32::try_from(AFTER_GRACE_S).unwrap());
        assert!(f64::from(stop) > needed, "{}", path.display());
        assert_eq!(value("KillSignal"), "SIGTERM");
        assert_eq!(value("Type"), "exec");
        assert_eq!(value("RestartPreventExitStatus"), "2");
        let directory = format!("/run/{}", value("RuntimeDirectory"));
        assert_eq!(setting(&settings, "discovery-path"), directory);
        if value("ExecStart").contains("in=dyn") {
            let cache = value("CacheDirectory");
            let homes = format!("HOME=%C/{cache} HF_HOME=%C/{cache}/huggingface");
            assert_eq!(value("Environment"), homes, "{}", path.display());
            // Servers with several GPUs list the machine's addresses.
            let families: Vec<_> = value("RestrictAddressFamilies").split(' ').collect();
            assert!(families.contains(&"AF_NETLINK"), "{families:?}");
            // The operator's files choose both: they could not change what the unit says.
            assert_eq!(settings["out"]["source"], "default");
            assert_eq!(settings["model"]["source"], "unset");
        } else {
            let guide = std::fs::read_to_string(repository("docs/guide/other-apis.md")).unwrap();
            let folder = format!(
                "--batch-folder /var/lib/{}/batches",
                value("StateDirectory")
            );
            assert!(guide.contains(&folder), "{folder}");
        }
    }
}

#[tokio::test]
async fn the_image_is_built_with_the_default_features_and_starts_what_it_can() {
    let text = std::fs::read_to_string(repository("deploy/Dockerfile")).unwrap();
    let line = |prefix: &str| {
        let found = text.lines().find_map(|line| line.strip_prefix(prefix));
        found.unwrap_or_else(|| panic!("no {prefix}"))
    };
    // A fleet needs only the default features.
    assert_eq!(
        line("RUN cargo build "),
        "--profile dist --locked -p genset"
    );
    let built = line("COPY --from=build ").split(' ').next();
    assert_eq!(built, Some("/src/target/dist/genset"));
    let root = std::fs::read_to_string(repository("Cargo.toml")).unwrap();
    let manifest: toml::Table = root.parse().unwrap();
    let packaged = &manifest["profile"]["dist"];
    assert_eq!(packaged["lto"].as_str(), Some("fat"));
    assert_eq!(packaged["codegen-units"].as_integer(), Some(1));
    let version = line("FROM rust:").split('-').next().unwrap();
    assert!(root.contains(&format!("rust-version = \"{version}\"")));
    let start = Start {
        words: words(&serde_json::from_str(line("CMD ")).unwrap()),
        environment: BTreeMap::new(),
    };
    start.settings().await;
    assert_ne!(line("USER "), "0", "the image does not run as root");
}

/// The Python value after `NAME = ` on a line, which must also be valid JSON.
fn of_python(source: &str, name: &str) -> Value {
    let prefix = format!("{name} = ");
    let found = source.lines().find_map(|line| line.strip_prefix(&prefix));
    let text = found.unwrap_or_else(|| panic!("no {name}"));
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[tokio::test]
async fn the_image_for_python_has_the_wheel_and_what_genset_deploy_starts() {
    let text = std::fs::read_to_string(repository("deploy/Dockerfile.python")).unwrap();
    let line = |prefix: &str| {
        let found = text.lines().find_map(|line| line.strip_prefix(prefix));
        found.unwrap_or_else(|| panic!("no {prefix}"))
    };
    // The path where `cargo xtask wheel` puts it, and the only file in the build context.
    let copied = line("COPY ").split(' ').next().unwrap();
    assert_eq!(copied, "dist/genset-*.whl");
    let ignored = repository("deploy/Dockerfile.python.dockerignore");
    let ignored = std::fs::read_to_string(ignored).unwrap();
    assert!(ignored.lines().any(|line| line == format!("!{copied}")));
    let package = std::fs::read_to_string(repository("python/pyproject.toml")).unwrap();
    let package: toml::Table = package.parse().unwrap();
    let (_, extras) = text.split_once("$wheel[").unwrap();
    for extra in extras.split(']').next().unwrap().split(',') {
        let known = &package["project"]["optional-dependencies"];
        assert!(known.get(extra).is_some(), "no extra {extra}");
    }
    // Another base has its own Python, and maybe its own entry point.
    assert_eq!(line("FROM "), "${BASE}");
    let python = line("ARG BASE=python:").split('-').next().unwrap();
    let classifier = format!("Programming Language :: Python :: {python}");
    let classifiers = package["project"]["classifiers"].as_array().unwrap();
    assert!(
        classifiers
            .iter()
            .any(|known| known.as_str() == Some(classifier.as_str()))
    );
    // The manifests name the program to start.
    assert_eq!(line("ENTRYPOINT "), "[]");
    let deploy = std::fs::read_to_string(repository("python/src/genset/deploy.py")).unwrap();
    let ports = ["HTTP_PORT", "WIRE_PORT", "STATUS_PORT"];
    let ports = ports.map(|name| of_python(&deploy, name).to_string());
    assert_eq!(line("EXPOSE "), ports.join(" "));
    let mut started = words(&serde_json::from_str(line("CMD ")).unwrap());
    assert_eq!(started.remove(0), "genset");
    let start = Start {
        words: started,
        environment: BTreeMap::new(),
    };
    let settings = start.settings().await;
    assert_eq!(setting(&settings, "http-port").to_string(), ports[0]);
}

/// The user of the images, which is not root, owns the folder on which a cache of models is mounted.
#[test]
fn both_images_have_a_place_for_models_of_the_hub() {
    let deploy = std::fs::read_to_string(repository("python/src/genset/deploy.py")).unwrap();
    let user = of_python(&deploy, "IMAGE_USER");
    let cache = of_python(&deploy, "MODEL_CACHE");
    let parts = [
        format!("\nUSER {user}:{user}\n"),
        format!("\nENV HF_HOME={}\n", string(&cache)),
        format!("useradd --system --uid {user} --user-group --create-home "),
        "install --directory --owner=genset --group=genset \"$HF_HOME\"".to_owned(),
    ];
    for file in ["deploy/Dockerfile", "deploy/Dockerfile.python"] {
        let text = std::fs::read_to_string(repository(file)).unwrap();
        for part in &parts {
            assert!(text.contains(part), "{file}: no {part:?}");
        }
    }
}

/// Our metrics in a query, by their documented names.
fn metrics_in(query: &str) -> Vec<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = query.split(|c| !is_part(c));
    let names = words.filter(|word| word.starts_with("genset_"));
    let histogram = |name: &str| {
        let suffixes = ["_bucket", "_sum", "_count"].into_iter();
        suffixes
            .filter_map(|suffix| name.strip_suffix(suffix))
            .map(str::to_owned)
            .next()
    };
    names
        .map(|name| histogram(name).unwrap_or_else(|| name.to_owned()))
        .collect()
}

#[test]
fn the_dashboard_and_the_alerts_ask_for_metrics_that_exist() {
    let text = std::fs::read_to_string(repository("deploy/grafana/genset.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = list(&dashboard, "/panels").iter();
    let of_panels = panels.flat_map(|panel| list(panel, "/targets"));
    let alerts = one_yaml("deploy/prometheus/alerts.yml");
    let of_alerts = list(&alerts, "/groups/0/rules").iter();
    let queries: Vec<_> = of_panels.chain(of_alerts).collect();
    assert!(queries.len() > 20);
    let documented = documented();
    for query in queries {
        let query = string(&query["expr"]);
        let metrics = metrics_in(query);
        let is_about_us = !metrics.is_empty() || query.starts_with("up{");
        assert!(is_about_us, "{query:?} asks for nothing of ours");
        for metric in metrics {
            let row = documented.get(&metric);
            let row = row.unwrap_or_else(|| panic!("{query:?}: no metric {metric}"));
            let is_quantile = query.contains("histogram_quantile");
            assert_eq!(row.kind == "histogram", is_quantile, "{query:?}");
        }
    }
}

#[test]
fn ids_and_places_of_the_dashboards_panels_are_their_own() {
    let text = std::fs::read_to_string(repository("deploy/grafana/genset.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let panels = list(&dashboard, "/panels");
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64()).collect();
    let places = panels.iter().map(|panel| {
        let place = &panel["gridPos"];
        (place["x"].as_u64(), place["y"].as_u64())
    });
    assert_eq!(ids.len(), panels.len());
    assert_eq!(places.collect::<BTreeSet<_>>().len(), panels.len());
}
