//! The required behaviour of every request plane, tested through the trait alone.
//!
//! A plane implements [`PlaneKind`], which creates planes, and `plane_suite!` creates a test for each case:
//! `plane_suite!(tcp, OverTcp);`. A plane inside one process skips the tests that need two processes:
//! `plane_suite!(memory, InMemory, one_process);`. Every case gets its own planes.

pub(crate) mod border;
mod cancellation;
mod responses;
mod streams;

use std::future::{Ready, ready};
use std::sync::Arc;

use async_trait::async_trait;
use futures_util::{StreamExt, TryStreamExt};
use genset_backend_common::{EngineError, MetricsRegistry, RequestContext};
use genset_runtime::discovery::Address;
use genset_runtime::plane::{
    ErasedHandler, Payload, RequestPlane, ResponseStream, Served, WireConfig, call,
};
use genset_runtime::{EndpointName, InstanceId};
use tokio::sync::Notify;
use tokio_util::sync::{CancellationToken, DropGuard};

pub(crate) use crate::support::streaming;
use crate::support::{ctx, handler, soon};

pub(crate) use self::{border::*, cancellation::*, responses::*, streams::*};

/// Creates planes of one kind, each for its own process.
#[async_trait]
pub(crate) trait PlaneKind: Send + Sync {
    /// The plane of another process.
    async fn plane(&self, config: WireConfig, metrics: &MetricsRegistry) -> Arc<dyn RequestPlane>;

    /// The plane of a process that takes over `address` from one that is gone; `None` if addresses are never reused.
    async fn plane_at(
        &self,
        address: &Address,
        config: WireConfig,
    ) -> Option<Arc<dyn RequestPlane>>;
}

/// Creates a module with one test for each case: `plane_suite!(name, kind)`; `kind` may await.
macro_rules! plane_suite {
    ($name:ident, $kind:expr) => {
        $crate::plane::suite::plane_suite!($name, $kind, one_process);

        mod across_the_border {
            use super::*;

            $crate::plane::suite::plane_suite!(@cases $name, $kind,
                a_panic_is_an_error_of_its_own_request,
                a_process_that_ends_disconnects_its_streams_at_once,
                a_process_that_came_back_is_called_again,
                a_process_that_shuts_down_finishes_its_streams,
                one_stream_too_many_is_overloaded,
                what_no_frame_holds_is_refused_and_nothing_else,
                a_connection_made_ahead_serves_the_first_request,
                two_processes_call_each_other,
                nothing_stays_open_after_the_last_response,
                cancelling_reaches_the_handler_of_a_stream_that_has_unread_items,
                a_response_that_ended_listens_to_no_cancellation,
            );
        }
    };
    ($name:ident, $kind:expr, one_process) => {
        $crate::plane::suite::plane_suite!(@cases $name, $kind,
            a_request_gets_its_response,
            items_come_in_order,
            a_response_may_be_empty,
            a_refusal_keeps_its_kind_message_and_details,
            an_error_comes_after_the_items_before_it,
            what_is_not_of_the_expected_type_is_refused,
            large_requests_and_items_arrive_whole,
            deadline_trace_and_headers_arrive,
            nobody_there_is_cannot_connect,
            an_endpoint_that_ended_takes_no_more_and_finishes_what_it_has,
            an_endpoint_that_ends_ends_those_that_its_handler_serves,
            many_endpoints_share_a_process,
            thousands_of_streams_at_once_are_all_right,
            a_slow_reader_holds_up_only_its_own_stream,
            dropping_the_response_ends_the_handlers_stream,
            dropping_the_call_ends_the_handler,
            cancelling_reaches_the_handler_and_the_terminal_still_comes,
        );
    };
    (@cases $name:ident, $kind:expr, $($case:ident,)*) => {
        mod $name {
            use super::*;

            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    let kind = $kind;
                    $crate::plane::suite::$case(&kind).await;
                }
            )*
        }
    };
}
pub(crate) use plane_suite;

/// Two processes: one calls, the other serves.
pub(crate) struct Pair {
    pub(crate) caller: Arc<dyn RequestPlane>,
    pub(crate) callee: Arc<dyn RequestPlane>,
}

impl Pair {
    pub(crate) async fn of(kind: &dyn PlaneKind) -> Self {
        Self::with(kind, deaf()).await
    }

    pub(crate) fn new(caller: Arc<dyn RequestPlane>, callee: Arc<dyn RequestPlane>) -> Self {
        Self { caller, callee }
    }

    /// A process that only calls.
    pub(crate) fn calling(plane: Arc<dyn RequestPlane>) -> Self {
        Self::new(Arc::clone(&plane), plane)
    }

    /// Both ends with these limits.
    pub(crate) async fn with(kind: &dyn PlaneKind, config: WireConfig) -> Self {
        Self {
            caller: kind
                .plane(config.clone(), &MetricsRegistry::default())
                .await,
            callee: kind.plane(config, &MetricsRegistry::default()).await,
        }
    }

    /// Serves `answer` as instance 1 of [`name`].
    pub(crate) async fn serve<A, F, Req, Resp>(&self, answer: A) -> Served
    where
        A: Fn(Req, RequestContext) -> F + Send + Sync + 'static,
        F: Future<Output = Result<ResponseStream<Resp>, EngineError>> + Send + 'static,
        Req: Payload,
        Resp: Payload,
    {
        serve(&*self.callee, &name("generate"), 1, answer).await
    }

    /// Calls what [`Self::serve`] serves.
    pub(crate) async fn call<Req: Payload, Resp: Payload>(
        &self,
        served: &Served,
        request: Req,
    ) -> Result<ResponseStream<Resp>, EngineError> {
        self.call_at(&served.address, request, ctx()).await
    }

    /// Calls [`name`]`("generate")` at `address`.
    pub(crate) async fn call_at<Req: Payload, Resp: Payload>(
        &self,
        address: &Address,
        request: Req,
        ctx: RequestContext,
    ) -> Result<ResponseStream<Resp>, EngineError> {
        let endpoint = name("generate");
        soon(call(&*self.caller, address, &endpoint, request, ctx)).await
    }

    /// Calls, and reads to the end.
    pub(crate) async fn ask<Req: Payload, Resp: Payload>(
        &self,
        served: &Served,
        request: Req,
    ) -> Result<Vec<Resp>, EngineError> {
        soon(self.call(served, request).await?.try_collect()).await
    }

    /// Asks `served`, which is [`count`], for the numbers below a number.
    pub(crate) async fn count_to(&self, served: &Served, below: u32) {
        let got: Vec<u32> = self.ask(served, below).await.unwrap();
        assert!(got.iter().copied().eq(0..below), "{got:?}");
    }

    /// Serves and calls.
    pub(crate) async fn works(&self) {
        let served = self.serve(count).await;
        self.count_to(&served, 3).await;
    }
}

/// An endpoint's name.
pub(crate) fn name(endpoint: &str) -> EndpointName {
    EndpointName::try_new("test", "worker", endpoint).unwrap()
}

pub(crate) async fn serve<A, F, Req, Resp>(
    plane: &dyn RequestPlane,
    endpoint: &EndpointName,
    instance: u64,
    answer: A,
) -> Served
where
    A: Fn(Req, RequestContext) -> F + Send + Sync + 'static,
    F: Future<Output = Result<ResponseStream<Resp>, EngineError>> + Send + 'static,
    Req: Payload,
    Resp: Payload,
{
    let served = plane.serve(endpoint, InstanceId(instance), erased(answer));
    soon(served).await.unwrap()
}

pub(crate) fn erased<A, F, Req, Resp>(answer: A) -> Arc<ErasedHandler>
where
    A: Fn(Req, RequestContext) -> F + Send + Sync + 'static,
    F: Future<Output = Result<ResponseStream<Resp>, EngineError>> + Send + 'static,
    Req: Payload,
    Resp: Payload,
{
    Arc::new(ErasedHandler::new(handler(answer)))
}

/// A complete response.
pub(crate) fn items<T: Send + 'static>(
    items: impl IntoIterator<Item = T, IntoIter: Send + 'static>,
) -> Result<ResponseStream<T>, EngineError> {
    let items = futures_util::stream::iter(items);
    Ok(Box::pin(items.map(Ok)))
}

/// Responds to a number with the numbers below it.
pub(crate) async fn count(
    below: u32,
    _ctx: RequestContext,
) -> Result<ResponseStream<u32>, EngineError> {
    items(0..below)
}

/// Yields 0, and then 7 for each notification.
pub(crate) fn sevens(go_on: &Arc<Notify>) -> Ready<Result<ResponseStream<u32>, EngineError>> {
    let sevens = futures_util::stream::unfold(Arc::clone(go_on), |go_on| async move {
        go_on.notified().await;
        Some((Ok(7), go_on))
    });
    streaming(futures_util::stream::iter([Ok(0)]).chain(sevens))
}

/// Yields 0, then nothing; `dropped` shows when it is dropped.
pub(crate) fn hang(dropped: DropGuard) -> Result<ResponseStream<u32>, EngineError> {
    let first = futures_util::stream::iter([Ok(0)]);
    let rest = futures_util::stream::once(async move {
        let _dropped = dropped;
        std::future::pending().await
    });
    Ok(Box::pin(first.chain(rest)))
}

/// Serves [`hang`] at the other end; the token is cancelled when the handler's stream is dropped.
pub(crate) async fn serve_hanging(pair: &Pair) -> (Served, CancellationToken) {
    let dropped = CancellationToken::new();
    let seen = dropped.clone();
    let served = pair
        .serve(move |(): (), _ctx| ready(hang(seen.clone().drop_guard())))
        .await;
    (served, dropped)
}
