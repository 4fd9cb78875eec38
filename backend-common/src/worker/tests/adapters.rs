//! Adapters: loaded before the worker is listed, published on every change, and reloaded after the engine lost them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;

use super::fakes::{Call, MODEL, World, config, ended, reaches, serving, spawn, stop_cleanly};
use crate::config::{Capabilities, EngineConfig};
use crate::controls::{Adapter, ControlRequest, EngineControls};
use crate::error::{At, EngineError, ErrorKind};
use crate::worker::{Listing, Outcome, State, Suspended, WorkerConfig};

fn adapter(name: &str) -> Adapter {
    Adapter {
        name: name.into(),
        source: format!("adapters/{name}"),
    }
}

/// An engine with adapters, some of which cannot be loaded.
#[derive(Clone, Default)]
struct Adapters {
    loaded: Arc<Mutex<BTreeMap<String, Adapter>>>,
    broken: Arc<Mutex<Vec<&'static str>>>,
    /// Whether it does not list its adapters.
    is_silent: bool,
    load_time: Duration,
}

#[async_trait]
impl EngineControls for Adapters {
    async fn load_adapter(&self, adapter: Adapter) -> Result<(), EngineError> {
        tokio::time::sleep(self.load_time).await;
        if self.broken.lock().iter().any(|name| *name == adapter.name) {
            return Err(EngineError::not_found("it is broken as planned"));
        }
        self.loaded.lock().insert(adapter.name.clone(), adapter);
        Ok(())
    }

    async fn unload_adapter(&self, name: &str) -> Result<(), EngineError> {
        let unloaded = self.loaded.lock().remove(name);
        unloaded
            .map(drop)
            .ok_or_else(|| EngineError::not_found("it is not loaded"))
    }

    async fn adapters(&self) -> Result<Vec<Adapter>, EngineError> {
        if self.is_silent {
            return Err(crate::controls::missing("list_adapters"));
        }
        Ok(self.loaded.lock().values().cloned().collect())
    }
}

fn with_adapters(adapters: &Adapters) -> Arc<World> {
    let world = World::new();
    let can = Capabilities {
        adapters: true,
        ..Capabilities::tokens()
    };
    world.declare(EngineConfig::new(MODEL, 100).with_capabilities(can));
    assert!(world.controls.set(Box::new(adapters.clone())).is_ok());
    world
}

fn asking(names: &[&str]) -> WorkerConfig {
    WorkerConfig {
        adapters: names.iter().map(|name| adapter(name)).collect(),
        ..config()
    }
}

fn published(world: &World) -> Vec<String> {
    let offer = world.offer();
    let adapters = offer.adapters.borrow();
    adapters.iter().map(|it| it.name.clone()).collect()
}

async fn load(world: &World, name: &str) -> Result<(), EngineError> {
    let adapter = adapter(name);
    let request = ControlRequest::LoadAdapter { adapter };
    world.offer().control.control(request).await.map(drop)
}

#[tokio::test(start_paused = true)]
async fn adapters_that_were_asked_for_are_there_before_the_worker_is_listed() {
    let adapters = Adapters::default();
    adapters.loaded.lock().insert("c".into(), adapter("c"));
    let world = with_adapters(&adapters);
    let handle = serving(&world, asking(&["b", "a", "c"])).await;
    assert_eq!(published(&world), ["a", "b", "c"]);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_loaded_at_start_ends_the_worker_by_the_flags_name() {
    let adapters = Adapters::default();
    adapters.broken.lock().push("b");
    for (world, names, kind) in [
        // The engine does not find it: the flag is wrong.
        (
            with_adapters(&adapters),
            &["a", "b"][..],
            ErrorKind::InvalidArgument,
        ),
        (World::new(), &["a"], ErrorKind::Unsupported),
        (
            with_adapters(&adapters),
            &[MODEL],
            ErrorKind::InvalidArgument,
        ),
    ] {
        let handle = spawn(&world, asking(names));
        let report = ended(&handle).await;
        assert!(matches!(report.outcome, Outcome::Failed(_)));
        let error = report.error.unwrap();
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(error.at(), Some(&At::from("--adapter")), "{error}");
        assert_eq!(
            (world.count(Call::List), world.count(Call::Cleanup)),
            (0, 1)
        );
    }
}

#[tokio::test(start_paused = true)]
async fn what_comes_and_goes_is_published_whether_the_engine_tells_or_not() {
    for is_silent in [false, true] {
        let adapters = Adapters {
            is_silent,
            ..Adapters::default()
        };
        let world = with_adapters(&adapters);
        let handle = serving(&world, asking(&["a"])).await;
        let mut changes = world.offer().adapters;
        changes.mark_unchanged();
        load(&world, "b").await.unwrap();
        assert!(changes.has_changed().unwrap());
        assert_eq!(published(&world), ["a", "b"]);
        // The path that the status server uses.
        let name = "a".to_owned();
        let unload = ControlRequest::UnloadAdapter { name };
        handle.control().control(unload.clone()).await.unwrap();
        assert_eq!(published(&world), ["b"]);
        let error = handle.control().control(unload).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        adapters.broken.lock().push("c");
        changes.mark_unchanged();
        load(&world, "c").await.unwrap_err();
        assert!(!changes.has_changed().unwrap());
        // The loss of an adapter becomes known after the next request, even though that fails.
        adapters.loaded.lock().clear();
        let name = "b".to_owned();
        let unload = ControlRequest::UnloadAdapter { name };
        handle.control().control(unload).await.unwrap_err();
        assert_eq!(published(&world).is_empty(), !is_silent);
        stop_cleanly(&handle).await;
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_loaded_for_somebody_who_left_is_published() {
    let adapters = Adapters {
        load_time: Duration::from_secs(5),
        ..Adapters::default()
    };
    let world = with_adapters(&adapters);
    let handle = serving(&world, asking(&[])).await;
    let mut changes = world.offer().adapters;
    let asked = tokio::time::timeout(Duration::from_secs(1), load(&world, "a"));
    assert!(asked.await.is_err());
    let listed = changes.wait_for(|known| !known.is_empty());
    let listed = tokio::time::timeout(Duration::from_secs(60), listed).await;
    assert!(listed.is_ok());
    drop(listed);
    assert_eq!(published(&world), ["a"]);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn names_that_mean_something_else_are_refused() {
    let world = with_adapters(&Adapters::default());
    let config = WorkerConfig {
        aliases: vec!["alias".into()],
        ..config()
    };
    let handle = serving(&world, config).await;
    for name in [MODEL, "alias", "", "a\nb", " a"] {
        let error = load(&world, name).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{name:?}");
        assert_eq!(error.at().map(|at| at.name()), Some("adapter.name"));
    }
    assert!(published(&world).is_empty());
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn an_engine_that_came_up_again_gets_its_adapters_back() {
    let adapters = Adapters::default();
    let world = with_adapters(&adapters);
    let handle = serving(&world, asking(&["a", "b"])).await;
    load(&world, "c").await.unwrap();
    world.set_down(true);
    reaches(&handle, State::Suspended(Suspended::Waiting)).await;
    adapters.loaded.lock().clear();
    adapters.broken.lock().push("b");
    world.set_down(false);
    reaches(&handle, State::Serving(Listing::Listed)).await;
    assert_eq!(published(&world), ["a", "c"]);
    assert!(adapters.loaded.lock().keys().eq(["a", "c"]));
    stop_cleanly(&handle).await;
}

#[test]
fn adapters_of_one_name_are_a_mistake_of_the_operators() {
    let error = asking(&["a", "a"]).validate().unwrap_err();
    assert_eq!(error.at().map(|at| at.name()), Some("--adapter"));
    assert!(asking(&["a\0"]).validate().is_err());
    asking(&["a", "b"]).validate().unwrap();
}
