//! Administrative requests: performed, refused by name, or contained.

use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::fakes::{World, config, serving, stop_cleanly};
use crate::controls::{Adapter, ControlReply, ControlRequest, EngineControls, SleepLevel};
use crate::error::{EngineError, ErrorKind};

fn adapter() -> Adapter {
    Adapter {
        name: "a".into(),
        source: "org/a".into(),
    }
}

/// Every request, the call that the engine records, and the reply.
fn table() -> Vec<(ControlRequest, &'static str, ControlReply)> {
    use ControlReply::{Adapters, Done, Profile};
    use ControlRequest as Ask;
    vec![
        (
            Ask::Sleep {
                level: SleepLevel::Weights,
            },
            "sleep Weights",
            Done,
        ),
        (Ask::Wake, "wake", Done),
        (Ask::ClearPrefixCache, "clear_prefix_cache", Done),
        (
            Ask::LoadAdapter { adapter: adapter() },
            "load_adapter a",
            Done,
        ),
        (
            Ask::UnloadAdapter { name: "a".into() },
            "unload_adapter a",
            Done,
        ),
        (
            Ask::ListAdapters,
            "list_adapters",
            Adapters {
                adapters: vec![adapter()],
            },
        ),
        (
            Ask::UpdateWeights {
                source: json!("v2"),
            },
            "update_weights \"v2\"",
            Done,
        ),
        (Ask::StartProfile, "start_profile", Done),
        (
            Ask::StopProfile,
            "stop_profile",
            Profile {
                location: "/tmp/p".into(),
            },
        ),
    ]
}

/// An engine that supports everything and records its calls.
#[derive(Clone, Default)]
struct Noting(Arc<Mutex<Vec<String>>>);

impl Noting {
    fn note(&self, text: impl Into<String>) -> Result<(), EngineError> {
        self.0.lock().push(text.into());
        Ok(())
    }
}

#[async_trait]
impl EngineControls for Noting {
    async fn sleep(&self, level: SleepLevel) -> Result<(), EngineError> {
        self.note(format!("sleep {level:?}"))
    }

    async fn wake(&self) -> Result<(), EngineError> {
        self.note("wake")
    }

    async fn clear_prefix_cache(&self) -> Result<(), EngineError> {
        self.note("clear_prefix_cache")
    }

    async fn load_adapter(&self, adapter: Adapter) -> Result<(), EngineError> {
        self.note(format!("load_adapter {}", adapter.name))
    }

    async fn unload_adapter(&self, name: &str) -> Result<(), EngineError> {
        self.note(format!("unload_adapter {name}"))
    }

    async fn adapters(&self) -> Result<Vec<Adapter>, EngineError> {
        self.note("list_adapters")?;
        Ok(vec![adapter()])
    }

    async fn update_weights(&self, source: Value) -> Result<(), EngineError> {
        self.note(format!("update_weights {source}"))
    }

    async fn start_profile(&self) -> Result<(), EngineError> {
        self.note("start_profile")
    }

    async fn stop_profile(&self) -> Result<String, EngineError> {
        self.note("stop_profile")?;
        Ok("/tmp/p".into())
    }
}

/// An engine whose controls support nothing.
struct Unable;

impl EngineControls for Unable {}

/// An engine that panics in `wake`, and refuses to sleep.
struct Broken;

#[async_trait]
impl EngineControls for Broken {
    async fn wake(&self) -> Result<(), EngineError> {
        panic!("as planned")
    }

    async fn sleep(&self, _level: SleepLevel) -> Result<(), EngineError> {
        Err(EngineError::new(ErrorKind::Unavailable, "requests run"))
    }
}

/// An engine whose `wake` never returns.
struct Asleep;

#[async_trait]
impl EngineControls for Asleep {
    async fn wake(&self) -> Result<(), EngineError> {
        std::future::pending().await
    }
}

fn with_controls(controls: impl EngineControls + 'static) -> Arc<World> {
    let world = World::new();
    assert!(world.controls.set(Box::new(controls)).is_ok());
    world
}

#[tokio::test(start_paused = true)]
async fn an_engine_without_an_ability_refuses_it_by_name() {
    for world in [World::new(), with_controls(Unable)] {
        let handle = serving(&world, config()).await;
        for (request, noted, _) in table() {
            let name = noted.split(' ').next().unwrap();
            let error = world.offer().control.control(request).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{name}");
            assert!(error.message().contains(name), "{name}: {error}");
        }
        stop_cleanly(&handle).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_engine_with_every_ability_is_asked_for_each() {
    let noting = Noting::default();
    let world = with_controls(noting.clone());
    let handle = serving(&world, config()).await;
    for (request, noted, reply) in table() {
        let answer = world.offer().control.control(request).await;
        assert_eq!(answer.unwrap(), reply, "{noted}");
        assert_eq!(noting.0.lock().last().map(String::as_str), Some(noted));
    }
    assert_eq!(noting.0.lock().len(), table().len());
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_or_an_error_is_the_answer_to_its_request_only() {
    let world = with_controls(Broken);
    let handle = serving(&world, config()).await;
    let control = world.offer().control;
    let panicked = control.control(ControlRequest::Wake).await.unwrap_err();
    assert_eq!(panicked.kind(), ErrorKind::Internal);
    assert!(
        !panicked.message().contains("as planned"),
        "not the client's"
    );
    let level = SleepLevel::KvCache;
    let refused = control.control(ControlRequest::Sleep { level }).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unavailable);
    stop_cleanly(&handle).await;
}

#[tokio::test(start_paused = true)]
async fn the_handle_asks_an_engine_that_serves_and_no_other() {
    let noting = Noting::default();
    let world = with_controls(noting.clone());
    let handle = serving(&world, config()).await;
    let control = handle.control();
    let woken = control.control(ControlRequest::Wake).await;
    assert_eq!(woken.unwrap(), ControlReply::Done);
    stop_cleanly(&handle).await;
    let late = control.control(ControlRequest::Wake).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Unavailable);
    assert_eq!(noting.0.lock().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_request_under_way_is_given_up_before_the_engine_cleans_up() {
    let world = with_controls(Asleep);
    let handle = serving(&world, config()).await;
    for control in [handle.control(), world.offer().control] {
        let (asked, handle) = (control.control(ControlRequest::Wake), &handle);
        let (given_up, ()) = tokio::join!(asked, stop_cleanly(handle));
        assert_eq!(given_up.unwrap_err().kind(), ErrorKind::EngineShutdown);
    }
}

#[tokio::test(start_paused = true)]
async fn the_log_is_no_engines_affair() {
    let world = with_controls(Noting::default());
    let handle = serving(&world, config()).await;
    let (control, filter) = (handle.control(), "debug".into());
    let asked = control.control(ControlRequest::LogLevel { filter });
    assert_eq!(asked.await.unwrap_err().kind(), ErrorKind::Unsupported);
    stop_cleanly(&handle).await;
}
