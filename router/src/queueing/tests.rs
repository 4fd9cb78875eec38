//! The queue, over instances with a number of slots.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Wake, Waker};

use futures_util::FutureExt;
use genset_backend_common::{CancelReason, MetricsRegistry};
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;

use super::*;
use crate::route::Holder;

/// The slots of all instances together; an answer holds one until dropped.
#[derive(Default)]
struct Places {
    free: AtomicUsize,
    /// Requests that got a slot.
    served: Mutex<Vec<String>>,
    tries: AtomicUsize,
    is_broken: AtomicBool,
    /// The delay before it reports that a slot was taken, or that none was free.
    takes_in: Mutex<Duration>,
    refuses_in: Mutex<Duration>,
}

/// Sleeps for `time`; returns at once for zero.
async fn pause(time: Duration) {
    if !time.is_zero() {
        tokio::time::sleep(time).await;
    }
}

struct Placed(Arc<Places>);

impl Stream for Placed {
    type Item = Result<Output, EngineError>;

    fn poll_next(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Pending
    }
}

impl Drop for Placed {
    fn drop(&mut self) {
        self.0.free.fetch_add(1, Ordering::Relaxed);
    }
}

/// No instance with a free slot has an adapter.
struct Below(Arc<Places>);

#[async_trait]
impl Route for Below {
    async fn route(
        &self,
        request: GenerateRequest,
        ctx: RequestContext,
        _left_out: &[InstanceId],
    ) -> Result<Routed, EngineError> {
        let places = &self.0;
        places.tries.fetch_add(1, Ordering::Relaxed);
        if places.is_broken.load(Ordering::Relaxed) {
            return Err(EngineError::internal("broken"));
        }
        let took = places
            .free
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |free| {
                free.checked_sub(1).filter(|_| request.adapter.is_none())
            });
        if took.is_err() {
            let time = *places.refuses_in.lock();
            pause(time).await;
            return Err(EngineError::new(ErrorKind::Overloaded, "full"));
        }
        places.served.lock().push(ctx.id().to_owned());
        let time = *places.takes_in.lock();
        pause(time).await;
        Ok(Routed {
            holder: Holder::One(InstanceId(1)),
            began: Instant::now(),
            outputs: OutputStream::from_raw(Box::pin(Placed(Arc::clone(places)))),
        })
    }
}

struct Site {
    places: Arc<Places>,
    queueing: Arc<Queueing>,
    registry: MetricsRegistry,
    tasks: TaskTracker,
}

type Answer = JoinHandle<Result<OutputStream, EngineError>>;

impl Site {
    fn new(places: usize, max_waiting: usize) -> Self {
        let registry = MetricsRegistry::default();
        let metrics = QueueMetrics::register(&registry, true);
        let free = Arc::new(Places::default());
        free.free.store(places, Ordering::Relaxed);
        let below = Arc::new(Below(Arc::clone(&free)));
        Self {
            places: free,
            queueing: Arc::new(Queueing::new(below, max_waiting, "m", &metrics)),
            registry,
            tasks: TaskTracker::new(),
        }
    }

    /// Sends a request, and lets it run until it blocks.
    async fn send(&self, priority: i32, ctx: RequestContext) -> Answer {
        let mut request = GenerateRequest::from_tokens("m", vec![1]);
        request.priority = priority;
        self.send_request(request, ctx).await
    }

    async fn send_request(&self, request: GenerateRequest, ctx: RequestContext) -> Answer {
        let queueing = Arc::clone(&self.queueing);
        let answer = self
            .tasks
            .spawn(async move { queueing.generate(request, ctx).await });
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        answer
    }

    async fn ask(&self, id: &str) -> Answer {
        self.send(0, RequestContext::new(id)).await
    }

    fn served(&self) -> Vec<String> {
        self.places.served.lock().clone()
    }

    fn waiting(&self) -> usize {
        self.queueing.queue.waiting.lock().len()
    }

    async fn until_waiting(&self, requests: usize) {
        while self.waiting() != requests {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

fn within(id: &str, seconds: u64) -> RequestContext {
    RequestContext::new(id).with_deadline(Instant::now() + Duration::from_secs(seconds))
}

#[tokio::test(start_paused = true)]
async fn requests_wait_for_a_place_and_get_it_in_order() {
    let site = Site::new(1, 10);
    let mut running = site.ask("first").await.await.unwrap().unwrap();
    let last = site.ask("last").await;
    let urgent = site.send(0, within("urgent", 60)).await;
    let important = site.send(3, RequestContext::new("important")).await;
    assert_eq!((site.served().len(), site.waiting()), (1, 3));
    for answer in [important, urgent, last] {
        drop(running);
        running = answer.await.unwrap().unwrap();
    }
    assert_eq!(site.served(), ["first", "important", "urgent", "last"]);
    assert_eq!(site.waiting(), 0);
    let metrics = site.registry.encode();
    assert!(
        metrics.contains("genset_router_wait_seconds_count 3"),
        "{metrics}"
    );
    assert!(metrics.contains("genset_router_waiting_requests{model=\"m\"} 0"));
}

/// Records the number of free slots when woken.
struct Looks {
    places: Arc<Places>,
    free: AtomicUsize,
}

impl Wake for Looks {
    fn wake(self: Arc<Self>) {
        let free = self.places.free.load(Ordering::Relaxed);
        self.free.store(free, Ordering::Relaxed);
    }
}

#[tokio::test(start_paused = true)]
async fn a_place_is_free_before_the_first_is_woken() {
    let site = Site::new(1, 10);
    let running = site.ask("first").await.await.unwrap().unwrap();
    let request = GenerateRequest::from_tokens("m", vec![1]);
    let mut second = site
        .queueing
        .generate(request, RequestContext::new("second"));
    let looks = Arc::new(Looks {
        places: Arc::clone(&site.places),
        free: AtomicUsize::new(usize::MAX),
    });
    let waker = Waker::from(Arc::clone(&looks));
    let mut cx = Context::from_waker(&waker);
    assert!(second.as_mut().poll(&mut cx).is_pending());
    drop(running);
    assert_eq!(looks.free.load(Ordering::Relaxed), 1);
    assert!(second.as_mut().poll(&mut cx).is_ready());
}

#[tokio::test(start_paused = true)]
async fn places_that_others_free_are_found_too() {
    let site = Site::new(0, 10);
    let answer = site.ask("r").await;
    site.places.free.store(1, Ordering::Relaxed);
    let before = Instant::now();
    drop(answer.await.unwrap().unwrap());
    assert!(before.elapsed() <= 2 * RETRY_INTERVAL);
}

#[tokio::test(start_paused = true)]
async fn the_last_in_order_is_refused_when_too_many_wait() {
    let site = Site::new(0, 2);
    let waiting = [site.ask("a").await, site.ask("b").await];
    let refused = site.ask("c").await.await.unwrap().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Overloaded);
    assert_eq!(refused.details().retry_after, Some(Duration::from_secs(1)));
    assert!(refused.message().contains("2 requests wait"), "{refused}");
    let important = site.send(1, RequestContext::new("d")).await;
    let [first, second] = waiting;
    let refused = second.await.unwrap().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Overloaded);
    assert!(!first.is_finished() && !important.is_finished());
    let metrics = site.registry.encode();
    let refusals = "genset_router_queue_refusals_total{model=\"m\",reason=\"full\"} 2";
    assert!(metrics.contains(refusals), "{metrics}");
    first.abort();
    important.abort();
    while site.waiting() > 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn who_would_come_too_late_is_refused_at_once() {
    let site = Site::new(1, 100);
    let mut running = Some(site.ask("0").await.await.unwrap().unwrap());
    let mut waiting = std::collections::VecDeque::new();
    for id in 1..=20 {
        waiting.push_back(site.ask(&id.to_string()).await);
    }
    // One departure every ten seconds.
    for _ in 0..8 {
        tokio::time::sleep(Duration::from_secs(10)).await;
        drop(running.take());
        running = Some(waiting.pop_front().unwrap().await.unwrap().unwrap());
    }
    let before = Instant::now();
    let answer = site.send(-1, within("late", 30)).await;
    let refused = answer.await.unwrap().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Overloaded);
    // Thirteen turns of ten seconds each.
    assert_eq!(
        refused.details().retry_after,
        Some(Duration::from_secs(130))
    );
    assert_eq!(before.elapsed(), Duration::ZERO);
    // A request that goes first has enough time.
    let first = site.send(1, within("first", 30)).await;
    assert!(first.now_or_never().is_none());
    let metrics = site.registry.encode();
    let refusals = "genset_router_queue_refusals_total{model=\"m\",reason=\"deadline\"} 1";
    assert!(metrics.contains(refusals), "{metrics}");
}

#[tokio::test(start_paused = true)]
async fn whoever_leaves_takes_no_place() {
    let site = Site::new(0, 10);
    let cancelled = RequestContext::new("cancelled");
    let answers = [
        site.send(0, cancelled.clone()).await,
        site.send(0, within("late", 5)).await,
        site.ask("stays").await,
    ];
    cancelled.cancel(CancelReason::Client);
    let [cancelled, late, stays] = answers;
    let kind = |answer: Result<OutputStream, EngineError>| answer.unwrap_err().kind();
    assert_eq!(kind(cancelled.await.unwrap()), ErrorKind::Cancelled);
    assert_eq!(kind(late.await.unwrap()), ErrorKind::DeadlineExceeded);
    assert_eq!(site.waiting(), 1);
    // Errors other than a lack of slots reach the client.
    site.places.is_broken.store(true, Ordering::Relaxed);
    assert_eq!(kind(stays.await.unwrap()), ErrorKind::Internal);
    assert_eq!(site.waiting(), 0);
}

/// One request at a time asks for a slot, however many wait.
#[tokio::test(start_paused = true)]
async fn only_the_first_is_tried_again() {
    let site = Site::new(0, 100);
    for id in 0..50 {
        drop(site.ask(&id.to_string()).await);
    }
    let before = site.places.tries.load(Ordering::Relaxed);
    tokio::time::sleep(RETRY_INTERVAL * 10).await;
    let tries = site.places.tries.load(Ordering::Relaxed) - before;
    assert!((9..=11).contains(&tries), "{tries}");
}

/// Over the wire an instance accepts a request with its first token.
#[tokio::test(start_paused = true)]
async fn who_waits_for_its_first_token_keeps_no_other_waiting() {
    let site = Site::new(0, 100);
    let ids: Vec<String> = (0..10).map(|id: u32| id.to_string()).collect();
    let mut waiting = Vec::new();
    for id in &ids {
        waiting.push(site.ask(id).await);
    }
    *site.places.takes_in.lock() = Duration::from_secs(1);
    site.places.free.store(10, Ordering::Relaxed);
    let before = Instant::now();
    site.until_waiting(0).await;
    assert!(before.elapsed() < Duration::from_millis(500));
    let mut running = Vec::new();
    for answer in waiting {
        running.push(answer.await.unwrap().unwrap());
    }
    assert!(before.elapsed() < Duration::from_millis(1500));
    assert_eq!(site.served(), ids);
    let metrics = site.registry.encode();
    assert!(metrics.contains("genset_router_wait_seconds_count 10"));
    assert!(metrics.contains("genset_router_waiting_requests{model=\"m\"} 0"));
}

#[tokio::test(start_paused = true)]
async fn who_is_refused_late_is_back_before_those_that_came_later() {
    let site = Site::new(0, 10);
    let first = site.ask("first").await;
    *site.places.refuses_in.lock() = GRACE * 3;
    site.until_waiting(0).await;
    *site.places.refuses_in.lock() = Duration::ZERO;
    let second = site.ask("second").await;
    assert_eq!(site.waiting(), 1);
    site.until_waiting(2).await;
    site.places.free.store(2, Ordering::Relaxed);
    let running = [
        first.await.unwrap().unwrap(),
        second.await.unwrap().unwrap(),
    ];
    assert_eq!(site.served(), ["first", "second"]);
    assert_eq!(site.waiting(), 0);
    drop(running);
}

#[tokio::test(start_paused = true)]
async fn who_is_refused_late_is_the_last_when_too_many_wait() {
    let site = Site::new(0, 1);
    let first = site.ask("first").await;
    *site.places.refuses_in.lock() = GRACE * 3;
    site.until_waiting(0).await;
    *site.places.refuses_in.lock() = Duration::ZERO;
    let important = site.send(1, RequestContext::new("important")).await;
    let refused = first.await.unwrap().unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Overloaded);
    assert!(refused.message().contains("1 requests wait"), "{refused}");
    assert_eq!(site.waiting(), 1);
    important.abort();
}

#[tokio::test(start_paused = true)]
async fn who_waits_for_an_adapter_keeps_no_other_waiting() {
    let site = Site::new(1, 10);
    let mut request = GenerateRequest::from_tokens("m", vec![1]);
    request.adapter = Some("a".to_owned());
    let adapted = RequestContext::new("adapted");
    let adapted = site.send_request(request, adapted).await;
    assert_eq!(site.waiting(), 1);
    let before = Instant::now();
    let running = site.ask("first").await.await.unwrap().unwrap();
    // A waiting request may get a freed slot although another is before it.
    let second = site.ask("second").await;
    assert_eq!(site.waiting(), 2);
    drop(running);
    let running = second.await.unwrap().unwrap();
    assert_eq!(before.elapsed(), Duration::ZERO);
    assert_eq!(site.served(), ["first", "second"]);
    // It also gets a slot that another frontend freed.
    let third = site.ask("third").await;
    site.places.free.store(1, Ordering::Relaxed);
    drop(third.await.unwrap().unwrap());
    assert!(before.elapsed() <= 2 * RETRY_INTERVAL);
    assert!(!adapted.is_finished());
    adapted.abort();
    drop(running);
}
