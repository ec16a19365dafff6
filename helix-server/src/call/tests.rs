//! Tests of the limits on clients.

use super::*;
use crate::memory::MEMORY_LIMIT_MIN;

fn small() -> Arc<ClientLoad> {
    ClientLoad::new(MemoryShares { connections: 2, calls: 1, partitions_read: 3, ..least() })
}

fn least() -> MemoryShares {
    MemoryShares::of(MEMORY_LIMIT_MIN)
}

fn count(load: &ClientLoad, name: &str) -> u64 {
    load.events().counts().find(|(it, _)| *it == name).unwrap().1
}

#[test]
fn a_full_limit_rejects_counts_and_frees_again() {
    let load = small();
    let (first, second) = (load.connect().unwrap(), load.connect().unwrap());
    assert!(load.connect().is_none());
    assert_eq!((count(&load, "connections_refused"), load.connection_count()), (1, 2));
    drop(first);
    assert!(load.connect().is_some());
    drop(second);
    let call = load.acquire_call(0).unwrap();
    assert!(matches!(load.acquire_call(0), Err(Error::Throttled { .. })));
    drop(call);
    load.acquire_call(0).unwrap();
    let three = load.acquire_partitions(3).unwrap();
    assert!(load.acquire_partitions(1).is_err());
    drop(three);
    let beyond_limit = load.acquire_partitions(9).unwrap();
    assert_eq!(beyond_limit.bytes(), 3, "admitted when it is alone");
    assert_eq!((count(&load, "calls_refused"), count(&load, "partitions_refused")), (1, 1));
}

#[test]
fn no_connection_takes_more_than_half_of_the_free_calls() {
    let load = ClientLoad::new(MemoryShares { calls: 1_000, ..least() });
    let mut held = Vec::new();
    for half in [500, 250, 125, 63, 31, limits::CALLS_PER_CONNECTION_MIN] {
        let mut open = 0;
        while let Ok(permit) = load.acquire_call(open) {
            held.push(permit);
            open += 1;
        }
        assert_eq!(open, half);
    }
    load.acquire_call(0).unwrap();
}

#[tokio::test(start_paused = true)]
async fn connections_that_cancel_many_calls_share_the_rate_of_the_node() {
    let load = ClientLoad::new(least());
    let burst = limits::CANCELLED_BURST.as_secs() as u32;
    let connections = 2 * limits::CANCELLED_PER_SECOND_OF_NODE / limits::CANCELLED_PER_SECOND;
    let open: Vec<_> = (0..connections).map(|_| load.connect().unwrap()).collect();
    let mut cancelled: Vec<_> = open.iter().map(|_| CancelledCalls::new()).collect();
    // With half of the rate of each connection the node has its own.
    let mut cancel = |index: usize, count| open[index].cancel_calls(count, &mut cancelled[index]);
    let half = limits::CANCELLED_PER_SECOND * burst / 2;
    for index in 0..open.len() {
        assert_eq!(cancel(index, half), None);
    }
    let more = limits::CANCELLED_PER_SECOND / 2 - 1;
    assert!((0..open.len()).any(|index| cancel(index, more).is_some()));
    assert!(load.events().cancelled_calls_paced.get() > 0);
    // A client that cancels a few is never held back.
    let quiet = load.connect().unwrap();
    let mut few = CancelledCalls::new();
    assert_eq!(quiet.cancel_calls(limits::CANCELLED_UNPACED, &mut few), None);
}

#[test]
fn a_connection_leaves_others_the_rest_of_refused_requests() {
    let shares = MemoryShares { calls: 64, ..least() };
    let load = ClientLoad::new(shares);
    let (first, second) = (load.connect().unwrap(), load.connect().unwrap());
    let take = |connection: &Arc<ClientConnection>| {
        std::iter::from_fn(|| connection.try_acquire_discard()).collect::<Vec<_>>()
    };
    let held = take(&first);
    assert_eq!(held.len(), 32);
    assert_eq!(take(&second).len(), 16);
    drop(held);
    assert_eq!(take(&second).len(), 32);
}

#[test]
fn connections_share_the_windows_and_return_them() {
    let load = ClientLoad::new(MemoryShares::default());
    let open: Vec<_> = (0..500).map(|_| load.connect().unwrap()).collect();
    let windows: Vec<u64> = open.iter().map(|it| it.window_bytes()).collect();
    assert!(windows.is_sorted_by(|a, b| a >= b));
    assert!(windows[0] > 1 << 20, "{}", windows[0]);
    assert!(windows[499] < 2 * limits::WINDOW_BYTES_MIN);
    // A hundred records of 1 KiB with their framing.
    assert!(windows[17] / limits::FRAME_PART >= 104_000, "{}", windows[17]);
    let beyond: u64 = windows.iter().map(|it| it - limits::WINDOW_BYTES_MIN).sum();
    assert!(beyond <= load.shares().window_bytes);
    drop(open);
    assert_eq!(load.connect().unwrap().window_bytes(), windows[0]);
}

#[test]
fn open_files_limit_the_connections_too() {
    let load = small();
    load.limit_connections(1);
    let _only = load.connect().unwrap();
    assert!(load.connect().is_none());
    assert_eq!((load.connections_max(), load.connection_count()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_reader_waits_for_response_bytes_and_is_then_throttled() {
    let load = ClientLoad::new(least());
    let mut all = load.acquire_response(usize::MAX).await.unwrap();
    assert_eq!(load.response_bytes(), least().response_bytes);
    assert!(matches!(load.acquire_response(1).await, Err(Error::Throttled { .. })));
    assert_eq!(count(&load, "answers_refused"), 1);
    all.shrink_to(10);
    load.acquire_response(1000).await.unwrap();
    assert_eq!(load.response_bytes(), 10);
}

#[test]
fn responses_get_shorter_as_fewer_bytes_are_free() {
    let load = ClientLoad::new(least());
    assert_eq!(load.response_bytes_max(1 << 20), 1 << 20);
    let _most = load.try_acquire_response(least().response_bytes * 3 / 5).unwrap();
    let shorter = load.response_bytes_max(1 << 20);
    assert!(shorter < 1 << 20 && shorter > limits::RESPONSE_BYTES_MIN, "{shorter}");
    let _rest = load.try_acquire_response(least().response_bytes / 5).unwrap();
    assert_eq!(load.response_bytes_max(1 << 20), limits::RESPONSE_BYTES_MIN);
    assert_eq!(load.response_bytes_max(100), 100);
}

#[tokio::test(start_paused = true)]
async fn only_the_reader_that_stalls_too_long_is_closed() {
    let load = ClientLoad::new(least());
    let (stalled, reading) = (load.connect().unwrap(), load.connect().unwrap());
    let call = |connection: &Arc<ClientConnection>| CallMemory::new(&load, connection, None);
    let _unread = call(&stalled).track_response(vec![1; 100_000].into());
    tokio::time::advance(limits::STALLED_READER_MAX / 2).await;
    let read = call(&reading).track_response(vec![1; 100_000].into());
    load.close_stalled();
    assert!(!stalled.is_closed());
    tokio::time::advance(limits::STALLED_READER_MAX / 2).await;
    load.close_stalled();
    assert!(stalled.is_closed() && !reading.is_closed());
    assert_eq!(count(&load, "stalled_readers_ended"), 1);
    drop(read);
    assert!(reading.unread().is_none());
}

#[tokio::test(start_paused = true)]
async fn shutdown_closes_connections_without_open_calls() {
    let load = ClientLoad::new(MemoryShares { connections: 4, ..least() });
    let [silent, idle, calling, reading] = [(); 4].map(|()| load.connect().unwrap());
    for connection in [&idle, &calling, &reading] {
        connection.add_read_bytes(100);
    }
    let call = CallMemory::new(&load, &calling, None);
    let unread = CallMemory::new(&load, &reading, None).track_response(vec![1; 100_000].into());
    load.close_idle();
    assert!(silent.is_closed() && !idle.is_closed());
    tokio::time::advance(limits::SHUTDOWN_IDLE_WAIT_MAX).await;
    load.close_idle();
    assert!(idle.is_closed() && !calling.is_closed() && !reading.is_closed());
    drop((call, unread));
    load.close_idle();
    assert!(!calling.is_closed() && !reading.is_closed(), "their ends may be on their way");
    tokio::time::advance(limits::SHUTDOWN_IDLE_WAIT_MAX).await;
    load.close_idle();
    assert!(calling.is_closed() && reading.is_closed());
}

#[tokio::test(start_paused = true)]
async fn a_stalled_reader_is_closed_early_while_others_wait() {
    let load = ClientLoad::new(least());
    let stalled = load.connect().unwrap();
    let call = CallMemory::new(&load, &stalled, None);
    let _others = load.try_acquire_response(least().response_bytes - 100_000).unwrap();
    call.keep_response(load.try_acquire_response(100_000).unwrap());
    let unread = call.track_response(vec![1; 100_000].into());
    let waits = tokio::spawn({
        let load = load.clone();
        async move { load.acquire_response(1).await }
    });
    tokio::time::sleep(limits::STALLED_READER_PRESSED_MAX).await;
    load.close_stalled();
    assert!(stalled.is_closed());
    // The closed connection drops its responses.
    drop(unread);
    waits.await.unwrap().unwrap();
}

#[tokio::test]
async fn parts_of_a_response_hold_parts_of_its_permit() {
    let load = ClientLoad::new(least());
    let connection = load.connect().unwrap();
    let call = CallMemory::new(&load, &connection, None);
    let free = || load.response_bytes.available_permits();
    let all = free();
    // The permit covers the payloads, not their framing.
    call.keep_response(load.try_acquire_response(120_000).unwrap());
    let head = call.track_response_part(vec![1; 100].into());
    assert!(connection.unread().is_none(), "a small part counts with the next large one");
    let first = call.track_response_part(vec![2; 70_000].into());
    let between = call.track_response_part(vec![3; 50].into());
    let last = call.track_response_part(vec![4; 50_000].into());
    assert_eq!(free(), all - 70_000 - (50_000 - 150));
    for (part, bytes) in [(&head, 100), (&first, 70_000), (&between, 50), (&last, 50_000)] {
        assert_eq!(part.len(), bytes);
    }
    drop(first);
    assert_eq!(free(), all - (50_000 - 150));
    assert!(connection.unread().is_some());
    drop(last);
    assert_eq!(free(), all);
    assert!(connection.unread().is_none());
    // A small part that is the whole response is counted.
    call.keep_response(load.try_acquire_response(10).unwrap());
    let small = call.track_response_part(vec![5; 30].into());
    assert!(connection.unread().is_some() && free() == all - 10);
    drop(small);
    // A long part without a permit is counted.
    drop(call.track_response_part(vec![6; 30].into()));
    let long = call.track_response_part(vec![7; limits::RESPONSE_COUNTED_BYTES].into());
    assert_eq!(free(), all - limits::RESPONSE_COUNTED_BYTES);
    drop(long);
    assert_eq!(free(), all);
}
