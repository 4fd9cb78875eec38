//! The commands of a transfer to the engine thread.

use futures_util::FutureExt;
use genset_backend_common::ErrorKind;
use genset_scheduler::FreedSequences;

use super::*;

/// Blocks of one piece each.
fn layout() -> KvLayout {
    KvLayout {
        arrangement: "none".into(),
        dtype: "f16".into(),
        num_layers: 1,
        num_kv_heads: 1,
        head_dim: PIECE_BYTES / 16,
        block_size: 4,
        number_bytes: 2,
    }
}

/// A transfer of 40 pieces; `ahead` is the room that all transfers share.
async fn sending(commands: &mpsc::Sender<Command>, ahead: usize) -> KvBytes {
    let layout = layout();
    assert_eq!(layout.block_bytes(), PIECE_BYTES);
    let prompt_tokens = 40 * layout.block_size + 1;
    let holds = KvHolds::new(Duration::from_secs(60));
    let sequence = FreedSequences::new(|| {}).holding(SequenceId(1));
    let held = HeldPrompt {
        sequence,
        prompt_tokens,
    };
    let blocks = Blocks {
        hold: hex(holds.hold("r", held)),
        prompt_tokens,
        layout: layout.clone(),
        cached_blocks: 0,
        weights: None,
        adapter: None,
    };
    let source = Source {
        holds,
        layout,
        commands: commands.downgrade(),
        ahead: Arc::new(Semaphore::new(ahead)),
    };
    let data = serde_json::to_value(blocks).unwrap();
    let ctx = RequestContext::new("r");
    source.fetch(data, ctx).await.unwrap()
}

fn transfers(role: Role, weights: Option<u64>) -> Transfers {
    let lease = Duration::from_secs(60);
    Transfers::try_new(role, KvTransfers::new(1), lease, Some(layout()), weights).unwrap()
}

#[test]
fn blocks_of_other_weights_are_refused() {
    for (theirs, ours, is_taken) in [
        (Some(1), Some(1), true),
        (Some(1), Some(2), false),
        // An instance of an older version, which does not say its weights.
        (None, Some(1), false),
    ] {
        let prefill = transfers(Role::Prefill, theirs);
        let leg = PrefillLeg {
            transfers: prefill.clone(),
            request_id: "r".into(),
            prompt_tokens: 3,
            adapter: None,
        };
        let mut request = GenerateRequest::from_tokens("m", vec![1, 2, 3]);
        let sequence = FreedSequences::new(|| {}).holding(SequenceId(1));
        request.transfer = prefill.hold(&leg, sequence);
        let decode = transfers(Role::Decode, ours);
        let refusal = decode.source_of(&request, None).err();
        assert_eq!(refusal.is_none(), is_taken, "{theirs:?} {ours:?}");
        if let Some(refusal) = refusal {
            assert_eq!(refusal.kind(), ErrorKind::InvalidArgument);
            assert_eq!(refusal.at(), Some(&RequestField::Transfer.into()));
            assert!(refusal.message().contains(&hex(ours.unwrap())), "{refusal}");
        }
    }
}

#[test]
fn blocks_of_another_adapter_are_refused() {
    let [prefill, decode] = [Role::Prefill, Role::Decode].map(|role| transfers(role, Some(1)));
    for (computed_with, loaded, is_taken) in [
        (None, None, true),
        (Some(1), Some(1), true),
        (Some(1), Some(2), false),
        (Some(1), None, false),
        (None, Some(1), false),
    ] {
        let leg = PrefillLeg {
            transfers: prefill.clone(),
            request_id: "r".into(),
            prompt_tokens: 3,
            adapter: computed_with,
        };
        let mut request = GenerateRequest::from_tokens("m", vec![1, 2, 3]);
        let sequence = FreedSequences::new(|| {}).holding(SequenceId(1));
        request.transfer = prefill.hold(&leg, sequence);
        let at = match decode.source_of(&request, loaded) {
            Ok(source) => {
                assert_eq!(source, request.transfer);
                None
            }
            Err(error) => error.at().map(|at| at.name().to_owned()),
        };
        let expected = (!is_taken).then_some("transfer");
        assert_eq!(at.as_deref(), expected, "{computed_with:?} {loaded:?}");
    }
}

/// The pieces requested since the last call: their offsets and reply senders.
fn asked(commands: &mut mpsc::Receiver<Command>) -> VecDeque<(usize, oneshot::Sender<Bytes>)> {
    let mut asked = VecDeque::new();
    while let Ok(command) = commands.try_recv() {
        if let Command::Read { bytes, reply, .. } = command {
            asked.push_back((bytes.start, reply));
        }
    }
    asked
}

#[tokio::test]
async fn several_pieces_are_asked_for_ahead() {
    let (sender, mut commands) = mpsc::channel(64);
    let mut pieces = sending(&sender, ALL_AHEAD).await;
    assert!(pieces.next().now_or_never().is_none());
    let mut first = asked(&mut commands);
    let places: Vec<usize> = first.iter().map(|(place, _)| *place).collect();
    let expected: Vec<usize> = (0..PIECES_AHEAD).map(|it| it * PIECE_BYTES).collect();
    assert_eq!(places, expected);
    // For each piece sent, another is requested.
    let (_, reply) = first.pop_front().unwrap();
    reply.send(Bytes::from_static(b"piece")).unwrap();
    assert_eq!(pieces.next().await.unwrap().unwrap(), &b"piece"[..]);
    assert!(pieces.next().now_or_never().is_none());
    let places: Vec<usize> = (asked(&mut commands).iter())
        .map(|(place, _)| *place)
        .collect();
    assert_eq!(places, [PIECES_AHEAD * PIECE_BYTES]);
}

/// A transfer makes progress in spite of other transfers and of a full command queue.
#[tokio::test]
async fn fewer_are_asked_for_where_there_is_no_room() {
    let (sender, mut commands) = mpsc::channel(64);
    let mut pieces = sending(&sender, 3).await;
    assert!(pieces.next().now_or_never().is_none());
    assert_eq!(asked(&mut commands).len(), LEAST_AHEAD + 3);
    let (sender, mut commands) = mpsc::channel(1);
    let mut pieces = sending(&sender, ALL_AHEAD).await;
    assert!(pieces.next().now_or_never().is_none());
    let (_, reply) = asked(&mut commands).pop_front().unwrap();
    reply.send(Bytes::from_static(b"piece")).unwrap();
    assert!(pieces.next().await.unwrap().is_ok());
}
