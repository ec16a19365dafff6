//! Messages of a connection that is tampered with.

use helix_sim::tamper::{DATA, FrameAction, FrameTamperer, HEADER_BYTES, ONE_IN, PREFACE_BYTES};
use rand::SeedableRng;
use rand::rngs::StdRng;

fn frame(kind: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![0, 0, u8::try_from(payload.len()).unwrap(), kind, 0, 0, 0, 0, 1];
    frame.extend_from_slice(payload);
    frame
}

fn message(text: u8) -> Vec<u8> {
    vec![0, 0, 0, 0, 2, text, text]
}

/// Returns the messages of all DATA frames that were sent.
fn messages(mut out: &[u8]) -> Vec<u8> {
    let mut found = Vec::new();
    out = &out[PREFACE_BYTES..];
    while let [_, _, len, kind, ..] = *out {
        let (frame, rest) = out.split_at(HEADER_BYTES + usize::from(len));
        if kind == DATA {
            found.extend(frame[HEADER_BYTES..].chunks(7).map(|message| message[5]));
        }
        out = rest;
    }
    found
}

fn sent(rng: Option<&mut StdRng>, pieces: usize) -> (Vec<u8>, u32) {
    let mut written = vec![b'P'; PREFACE_BYTES];
    written.extend(frame(4, &[]));
    for number in 0..200 {
        written.extend(frame(DATA, &message(number)));
    }
    written.extend(frame(6, &[0; 8]));
    let (mut tamper, mut out, mut count) = (FrameTamperer::default(), Vec::new(), 0);
    let mut rng = rng;
    for piece in written.chunks(pieces) {
        tamper.process(piece, rng.as_deref_mut(), &mut out, |_| count += 1);
    }
    (messages(&out), count)
}

#[test]
fn leaves_traffic_unchanged_without_rng() {
    for pieces in [1, 7, 4096] {
        assert_eq!(sent(None, pieces), ((0..200).collect(), 0));
    }
}

#[test]
fn duplicates_and_delays_messages_but_loses_none() {
    let (mut doubled, mut swapped) = (false, false);
    for seed in 0..20 {
        let (got, _) = sent(Some(&mut StdRng::seed_from_u64(seed)), 13);
        assert_eq!(got[0], 0, "the handshake is not changed");
        doubled |= got.windows(2).any(|pair| pair[0] == pair[1]);
        swapped |= got.windows(2).any(|pair| pair[0] > pair[1]);
        let mut all = got.clone();
        all.sort_unstable();
        all.dedup();
        assert_eq!(all, (0..200).collect::<Vec<u8>>(), "seed {seed}");
    }
    assert!(doubled && swapped);
}

#[test]
fn delayed_message_may_split_the_next_one() {
    let (long, mut within) = (message(9), 0);
    for seed in 0..400 {
        let mut rng = StdRng::seed_from_u64(seed);
        let mut tamper = FrameTamperer::after_handshake();
        let frames = [frame(DATA, &message(8)), frame(DATA, &long[..6]), frame(DATA, &long[6..])];
        let (mut out, mut on_action) = (Vec::new(), Vec::new());
        tamper.process(&frames.concat(), Some(&mut rng), &mut out, |action| on_action.push(action));
        if on_action == [FrameAction::Late, FrameAction::InsideMessage] {
            let [late, begins, ends] = &frames;
            assert_eq!(out, [&begins[..], late, ends].concat());
            within += 1;
        } else {
            assert!(!on_action.contains(&FrameAction::InsideMessage), "{on_action:?}");
        }
    }
    assert!(within > 0);
}

#[test]
fn leaves_messages_of_two_frames_unchanged() {
    let (long, mut rng) = (message(9), StdRng::seed_from_u64(1));
    let mut tamper = FrameTamperer::after_handshake();
    for _ in 0..4 * ONE_IN {
        for half in [&long[..3], &long[3..]] {
            assert_eq!(tamper.action(&frame(DATA, half), Some(&mut rng)), FrameAction::Sent);
        }
    }
}
