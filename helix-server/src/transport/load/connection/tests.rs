//! Memory of messages that have arrived in part, with several connections.

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use super::*;
use crate::memory::{MEMORY_LIMIT_MIN, MemoryShares};

const WAIT: Duration = Duration::from_secs(2);

#[tokio::test(start_paused = true)]
async fn half_received_messages_do_not_wait_for_each_other() {
    let load = ClientLoad::new(MemoryShares::of(MEMORY_LIMIT_MIN));
    let all = load.shares.arriving_bytes;
    let [first, second, third] = [(); 3].map(|()| load.connect().unwrap());
    let half = first.try_acquire_arriving(all / 2).unwrap();
    assert!(first.try_acquire_arriving(1).is_none(), "others keep their half");
    let quarter = second.try_acquire_arriving(all / 4).unwrap();
    let rest = load.arriving_bytes.clone().try_acquire_many_owned(permits(all / 4)).unwrap();
    assert_eq!(load.request_bytes(), all);
    // One message claims its memory elsewhere; the next one waits for its turn.
    let whole = second.clone().acquire_arriving(None, 1, 1 << 20, WAIT).await.unwrap();
    assert!(matches!(whole, MessageClaim::Whole { .. }));
    assert!(!load.has_waiting_requests());
    let refused = third.clone().acquire_arriving(None, 1, 1 << 20, WAIT);
    assert!(matches!(refused.await, Err(Error::Throttled { .. })));
    let waiting = tokio::spawn(third.clone().acquire_arriving(None, 1, 1 << 20, WAIT));
    tokio::task::yield_now().await;
    assert!(load.has_waiting_requests());
    drop(whole);
    let whole = waiting.await.unwrap().unwrap();
    assert!(matches!(whole, MessageClaim::Whole { .. }));
    // Memory of messages that have arrived serves too, for a connection with less than half.
    let beyond = tokio::spawn(first.clone().acquire_arriving(None, 1, 1 << 20, WAIT));
    let waiting = tokio::spawn(second.clone().acquire_arriving(None, 1, 1 << 20, WAIT));
    tokio::task::yield_now().await;
    drop(quarter);
    let part = waiting.await.unwrap().unwrap();
    assert!(matches!(part, MessageClaim::Part(_)));
    assert!(matches!(beyond.await.unwrap(), Err(Error::Throttled { .. })));
    drop((half, rest, whole, part));
    assert_eq!(load.request_bytes(), 0);
    assert!(third.try_acquire_arriving(all / 2).is_some());
}

#[tokio::test(start_paused = true)]
async fn waits_for_a_connections_own_memory_delay_no_other_connection() {
    let load = ClientLoad::new(MemoryShares::of(MEMORY_LIMIT_MIN));
    let [busy, other] = [(); 2].map(|()| load.connect().unwrap());
    // The connection may have nothing more, though the node has memory for requests.
    let half = busy.try_acquire_arriving(load.shares.arriving_bytes / 2).unwrap();
    let own = load.shares.connection_request_bytes - (1 << 20);
    let own = busy.request_bytes.clone().try_acquire_many_owned(permits(own)).unwrap();
    let whole = tokio::spawn(busy.clone().acquire_arriving(None, 1, 2 << 20, WAIT));
    let arrived = tokio::spawn(busy.clone().acquire_request(None, 2 << 20, WAIT));
    tokio::task::yield_now().await;
    assert!(busy.has_waiting_requests() && !other.has_waiting_requests());
    assert!(!load.has_waiting_requests());
    assert_eq!(load.whole_turn.available_permits(), 1, "the node's turn is not withheld");
    drop(own);
    assert!(matches!(whole.await.unwrap().unwrap(), MessageClaim::Whole { .. }));
    arrived.await.unwrap().unwrap();
    assert_eq!((busy.has_waiting_requests(), busy.ended_waits()), (false, 2));
    drop(half);
    assert_eq!(load.request_bytes(), 0);
}

#[tokio::test(start_paused = true)]
async fn memory_goes_around_between_principals() {
    let load = ClientLoad::new(MemoryShares::of(MEMORY_LIMIT_MIN));
    let [busy, other] = [(); 2].map(|()| load.connect().unwrap());
    let [of_busy, of_other] = [(); 2].map(|()| Some(CallShare::of_principal()));
    let all = load.request_bytes.available_permits();
    let mut held = load.request_bytes.clone().try_acquire_many_owned(permits(all)).unwrap();
    let mut waiting = FuturesUnordered::new();
    for number in 0..100 {
        let (share, wait) = (of_busy.clone(), busy.clone());
        waiting.push(tokio::spawn(async move {
            (number, wait.acquire_request(share, 1 << 10, WAIT).await.unwrap())
        }));
    }
    tokio::task::yield_now().await;
    let small = tokio::spawn(other.acquire_request(of_other, 1 << 10, WAIT));
    tokio::task::yield_now().await;
    // Memory for two requests: one of each share.
    drop(held.split(2 << 10));
    let first = waiting.next().await.unwrap().unwrap();
    assert_eq!(first.0, 0, "within a share the requests keep their order");
    timeout(WAIT / 2, small).await.expect("it does not wait for 100").unwrap().unwrap();
    drop(held);
    while let Some(got) = waiting.next().await {
        got.unwrap();
    }
}
