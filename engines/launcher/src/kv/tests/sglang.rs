//! SGLang's events, and when its publisher is enabled.

use super::*;

#[test]
fn a_block_that_sglang_tells_twice_is_there_once() {
    let prompt = tokens(300, 64);
    let hashes = ours(None, &prompt);
    let batches = [
        batch(&[stored(&[FIRST], None, &prompt[..32])]),
        batch(&[stored(&[FIRST, SECOND], None, &prompt)]),
        // Another name for the same tokens.
        batch(&[
            stored(&[THIRD], None, &prompt[..32]),
            removed(FIRST),
            removed(THIRD),
            removed(THIRD),
        ]),
    ];
    let changes = all_of(Dialect::Sglang, &batches);
    let expected = [
        stored_event(None, &hashes[..1]),
        stored_event(Some(hashes[0]), &hashes[1..]),
        KvEventData::Removed {
            blocks: vec![hashes[0]],
        },
    ];
    assert_eq!(changes, expected);
}

/// Recorded from the publisher of SGLang 0.5.23, in format `dynamo`, with blocks of 4.
const SGLANG: [&str; 4] = [
    "93cb41dac0c4792000009187a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392d1dc74cf39290a1d3cef53b5b1706172656e74\
     5f626c6f636b5f68617368c0a9746f6b656e5f69647398cd012ccd012dcd012ecd012fcd0136cd0137cd0138cd0139aa626c6f636b5f73697a6504a76c6f\
     72615f6964c0a66d656469756da347505500",
    "93cb41dac0c4792000009387a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf7791d19b66c537d9b1706172656e745f626c\
     6f636b5f68617368cf39290a1d3cef53b5a9746f6b656e5f69647394cd02bccd02bdcd02becd01acaa626c6f636b5f73697a6504a76c6f72615f6964c0a6\
     6d656469756da34750\
     5588a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf3003bbafaacb2646b1706172656e745f626c6f636b5f68617368c0a9\
     746f6b656e5f69647394cd012ccd012dcd012ecd012faa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055aa63616368655f73\
     616c74a674656e616e74\
     88a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657391cf6130c6ca0b5c8b78b1706172656e745f626c6f636b5f68617368cf3003\
     bbafaacb2646a9746f6b656e5f69647394cd0136cd0137cd0138cd0139aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055aa\
     63616368655f73616c74a674656e616e7400",
    "93cb41dac0c4792000009283a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391cf7791d19b66c537d9a66d656469756da347\
     505583a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391d1dc74a66d656469756daa4350555f50494e4e454400",
    "93cb41dac0c4792000009288a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739105b1706172656e745f626c6f636b5f68617368\
     c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65a574756e\
     656481a474797065b0416c6c426c6f636b73436c656172656400",
];

fn bytes(hex: &str) -> Vec<u8> {
    let digit = |digit: u8| u8::try_from(char::from(digit).to_digit(16).unwrap()).unwrap();
    let pairs = hex.as_bytes().chunks_exact(2);
    pairs
        .map(|pair| digit(pair[0]) * 16 + digit(pair[1]))
        .collect()
}

#[test]
fn what_sglang_was_recorded_to_send_is_told_in_our_hashes() {
    let size = NonZeroU32::new(4).unwrap();
    let hashes =
        |salt: Option<&str>, tokens: &[u32]| hash_blocks(salt.map(salt_root), tokens, size);
    let prompt = [tokens(300, 4), tokens(310, 4)].concat();
    let plain = hashes(None, &[&prompt[..], &[700, 701, 702, 428]].concat());
    let salted = hashes(Some("tenant"), &prompt);
    let mut reader = Reader::new(Dialect::Sglang, 0, size, None);
    let changes: Vec<_> = (0..)
        .zip(SGLANG)
        .flat_map(|(number, batch)| reader.take(number, &bytes(batch)))
        .collect();
    let expected = [
        stored_event(None, &plain[..2]),
        stored_event(Some(plain[1]), &plain[2..]),
        stored_event(None, &salted[..1]),
        stored_event(Some(salted[0]), &salted[1..]),
        KvEventData::Removed {
            blocks: vec![plain[2]],
        },
        // A block that left only host memory, and one of an adapter, change nothing.
        KvEventData::Cleared,
    ];
    assert_eq!(changes, expected);
}

#[test]
fn the_publisher_of_sglang_is_switched_on_for_blocks_of_several_tokens() {
    let source = |page_size: Option<u32>| {
        let input = ServerInput::Tokens { vocab_size: None };
        let mut config = LauncherConfig::new(ServerKind::Sglang, "/m", input);
        config.kv_block_size = page_size.and_then(NonZeroU32::new);
        KvSource::for_server(&config, Dialect::Sglang).unwrap()
    };
    assert!(source(None).is_none() && source(Some(1)).is_none());
    let source = source(Some(16)).unwrap();
    let [flag, said] = source.args();
    let said: Value = serde_json::from_str(&said).unwrap();
    let expected = json!({"publisher": "zmq", "format": "dynamo", "endpoint": source.events(0), "replay_endpoint": source.replay(0)});
    assert_eq!((flag.as_str(), said), ("--kv-events-config", expected));
}
