//! Requests and responses arrive unchanged.

use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt};
use genset_backend_common::{
    EngineError, ErrorKind, RequestContext, RequestField, context::TraceContext,
};
use genset_runtime::discovery::Address;
use genset_runtime::plane::{ResponseStream, Served, call};
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::{Pair, PlaneKind, count, erased, items, name, serve};
use crate::support::{ctx, soon};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Question {
    text: String,
    numbers: Vec<f32>,
    urgent: Option<bool>,
}

pub(crate) async fn a_request_gets_its_response(kind: &dyn PlaneKind) {
    let pair = Pair::of(kind).await;
    let served = pair
        .serve(|question: Question, _ctx| async move { items([(question, 7u8)]) })
        .await;
    let question = Question {
        text: "wie weit, wie heiß?".into(),
        numbers: vec![0.1, f32::MAX],
        urgent: None,
    };
    let answer: Vec<(Question, u8)> = pair.ask(&served, question.clone()).await.unwrap();
    assert_eq!(answer, [(question, 7)]);
}

pub(crate) async fn items_come_in_order(kind: &dyn PlaneKind) {
    let pair = Pair::of(kind).await;
    let served = pair.serve(count).await;
    pair.count_to(&served, 10_000).await;
}

pub(crate) async fn a_response_may_be_empty(kind: &dyn PlaneKind) {
    let pair = Pair::of(kind).await;
    let served = pair.serve(count).await;
    pair.count_to(&served, 0).await;
}

pub(crate) async fn a_refusal_keeps_its_kind_message_and_details(kind: &dyn PlaneKind) {
    let refusal = EngineError::new(ErrorKind::Overloaded, "the queue is full")
        .with_at(RequestField::Priority)
        .with_retry_after(Duration::from_millis(1500))
        .with_request_id("r-1");
    let pair = Pair::of(kind).await;
    let told = refusal.clone();
    let served = pair
        .serve(move |(): (), _ctx| {
            let refusal: Result<ResponseStream<u32>, _> = Err(told.clone());
            std::future::ready(refusal)
        })
        .await;
    let error = pair.ask::<(), u32>(&served, ()).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.message(), error.details()),
        (refusal.kind(), refusal.message(), refusal.details())
    );
}

pub(crate) async fn an_error_comes_after_the_items_before_it(kind: &dyn PlaneKind) {
    let pair = Pair::of(kind).await;
    let served = pair
        .serve(|(): (), _ctx| async {
            let error = EngineError::new(ErrorKind::StreamIncomplete, "lost it");
            let all = [Ok(1u32), Ok(2), Err(error)];
            Ok(Box::pin(futures_util::stream::iter(all)) as ResponseStream<u32>)
        })
        .await;
    let mut response = pair.call::<(), u32>(&served, ()).await.unwrap();
    assert_eq!(soon(response.next()).await.unwrap().unwrap(), 1);
    assert_eq!(soon(response.next()).await.unwrap().unwrap(), 2);
    let error = soon(response.next()).await.unwrap().unwrap_err();
    assert_eq!(
        (error.kind(), error.message()),
        (ErrorKind::StreamIncomplete, "lost it")
    );
    assert!(soon(response.next()).await.is_none());
}

pub(crate) async fn what_is_not_of_the_expected_type_is_refused(kind: &dyn PlaneKind) {
    let pair = Pair::of(kind).await;
    let served = pair.serve(count).await;
    let request = pair
        .ask::<String, u32>(&served, "ten".to_owned())
        .await
        .unwrap_err();
    assert_eq!(request.kind(), ErrorKind::InvalidArgument);
    assert_eq!(request.at().map(|at| at.name()), Some("request"));
    let response = pair.ask::<_, String>(&served, 1u32).await.unwrap_err();
    assert_eq!(response.kind(), ErrorKind::Internal);
    let right: Vec<u32> = pair.ask(&served, 1u32).await.unwrap();
    assert_eq!(right, [0]);
}

pub(crate) async fn large_requests_and_items_arrive_whole(kind: &dyn PlaneKind) {
    let pair = Pair::of(kind).await;
    let served = pair
        .serve(|text: String, _ctx| async move {
            items((0..20u32).map(move |index| (index, text.clone())))
        })
        .await;
    let text: String = (0..1 << 20)
        .map(|i| char::from(b'a' + (i % 23) as u8))
        .collect();
    let got: Vec<(u32, String)> = pair.ask(&served, text.clone()).await.unwrap();
    assert_eq!(got.len(), 20);
    for (position, (index, item)) in got.into_iter().enumerate() {
        assert_eq!(usize::try_from(index).unwrap(), position);
        assert!(
            item == text,
            "item {index} arrived otherwise than it was sent"
        );
    }
}

pub(crate) async fn deadline_trace_and_headers_arrive(kind: &dyn PlaneKind) {
    let pair = Pair::of(kind).await;
    let served = pair
        .serve(|(): (), ctx: RequestContext| async move {
            let trace = ctx.trace().cloned().unwrap_or_default();
            let left_ms = ctx
                .time_left()
                .map(|left| u64::try_from(left.as_millis()).unwrap());
            let priority = ctx.header("priority").map(str::to_owned);
            items([(ctx.id().to_owned(), trace, left_ms, priority)])
        })
        .await;
    type Seen = (String, TraceContext, Option<u64>, Option<String>);
    let traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let trace = TraceContext::parse(traceparent, "vendor=1").unwrap();
    let ctx = RequestContext::new("r-9")
        .with_trace(trace.clone())
        .with_header("priority", "high")
        .with_deadline(Instant::now() + Duration::from_secs(3600));
    let seen = pair.call_at(&served.address, (), ctx).await.unwrap();
    let seen: Vec<Seen> = soon(seen.try_collect()).await.unwrap();
    let [(id, seen_trace, left_ms, priority)] = &seen[..] else {
        panic!("{seen:?}");
    };
    assert_eq!((id.as_str(), seen_trace), ("r-9", &trace));
    assert_eq!(priority.as_deref(), Some("high"));
    // Later than now, and not later than it was.
    let left_ms = left_ms.unwrap();
    assert!((1..=3_600_000).contains(&left_ms), "{left_ms}");
}

pub(crate) async fn nobody_there_is_cannot_connect(kind: &dyn PlaneKind) {
    let pair = Pair::of(kind).await;
    let served = pair.serve(count).await;
    let location = |location: String| Address {
        location,
        ..served.address.clone()
    };
    let process = served.address.location.rsplit_once('/').unwrap().0;
    for address in [
        location(format!("{process}/0000000000000f")),
        location(format!("{process}/no-id")),
        location("nowhere".into()),
        location(String::new()),
        Address {
            plane: "pigeons".into(),
            ..served.address.clone()
        },
    ] {
        let error = pair.call_at::<u32, u32>(&address, 1, ctx()).await;
        let error = error.err().expect("nobody is there");
        assert_eq!(error.kind(), ErrorKind::CannotConnect, "{address}: {error}");
    }
    pair.count_to(&served, 2).await;
}

pub(crate) async fn an_endpoint_that_ended_takes_no_more_and_finishes_what_it_has(
    kind: &dyn PlaneKind,
) {
    let pair = Pair::of(kind).await;
    let served = pair.serve(count).await;
    let mut under_way = pair.call::<_, u32>(&served, 300u32).await.unwrap();
    assert_eq!(soon(under_way.next()).await.unwrap().unwrap(), 0);
    let Served { address, guard } = served;
    drop(guard);
    let error = pair.call_at::<u32, u32>(&address, 1, ctx()).await;
    let error = error.err().expect("it has ended");
    assert_eq!(error.kind(), ErrorKind::CannotConnect);
    let rest: Vec<u32> = soon(under_way.try_collect()).await.unwrap();
    assert!(rest.into_iter().eq(1..300));
}

pub(crate) async fn an_endpoint_that_ends_ends_those_that_its_handler_serves(kind: &dyn PlaneKind) {
    let pair = Pair::of(kind).await;
    let endpoint = name("inner");
    let inner = serve(&*pair.callee, &endpoint, 1, count).await;
    let address = inner.address.clone();
    let served = pair
        .serve(move |below: u32, ctx: RequestContext| {
            let _inner = &inner;
            count(below, ctx)
        })
        .await;
    pair.count_to(&served, 2).await;
    let (ended, has_ended) = oneshot::channel();
    std::thread::spawn(move || {
        drop(served);
        let _ = ended.send(());
    });
    soon(has_ended).await.unwrap();
    // The task of the last request may hold the handler a moment longer.
    let error = soon(async {
        loop {
            let called = call::<u32, u32>(&*pair.caller, &address, &endpoint, 1, ctx());
            match called.await {
                Ok(_) => tokio::task::yield_now().await,
                Err(error) => return error,
            }
        }
    });
    assert_eq!(error.await.kind(), ErrorKind::CannotConnect);
}

pub(crate) async fn many_endpoints_share_a_process(kind: &dyn PlaneKind) {
    let pair = Pair::of(kind).await;
    let mut all = Vec::new();
    for endpoint in 0..10u64 {
        for instance in 1..=10u64 {
            let endpoint = name(&format!("e{endpoint}"));
            let told = (endpoint.to_string(), instance);
            let answer = move |(): (), _ctx: RequestContext| {
                let told = told.clone();
                async move { items([told]) }
            };
            let served = serve(&*pair.callee, &endpoint, instance, answer).await;
            all.push((endpoint, instance, served));
        }
    }
    for (endpoint, instance, served) in &all {
        let got = call(&*pair.caller, &served.address, endpoint, (), ctx());
        let got: Vec<(String, u64)> = soon(soon(got).await.unwrap().try_collect()).await.unwrap();
        assert_eq!(got, [(endpoint.to_string(), *instance)]);
    }
    let (endpoint, ..) = &all[0];
    let again = pair
        .callee
        .serve(endpoint, genset_runtime::InstanceId(1), erased(count));
    let error = soon(again).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
}
