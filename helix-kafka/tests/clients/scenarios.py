"""Scenarios with confluent-kafka: failures under load, seeks, mixed groups, many partitions, logins.

scenarios.py SCENARIO BOOTSTRAP HELIX [ARGUMENT...]
"""

import atexit
import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import confluent_kafka
import confluent_kafka.admin

SCENARIO, BOOTSTRAP, HELIX = sys.argv[1:4]
ARGUMENTS = sys.argv[4:]
DEADLINE = 60


def expect(condition, what):
    if not condition:
        raise SystemExit(f"{SCENARIO}: {what}")


def helix(*arguments, fails=False):
    """Runs helix. Returns its output; with `fails` it must fail, and its errors are returned."""
    run = subprocess.run([HELIX, *arguments], capture_output=True, timeout=DEADLINE)
    expect((run.returncode != 0) == fails, f"helix {' '.join(arguments)}: {run}")
    return (run.stderr if fails else run.stdout).decode()


def until(what, condition):
    deadline = time.time() + DEADLINE
    while not condition():
        expect(time.time() < deadline, f"never: {what}")
        time.sleep(0.05)


def config(**more):
    return {"bootstrap.servers": BOOTSTRAP, **more}


def consumer(group, **more):
    return confluent_kafka.Consumer(config(**{
        "group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False,
        "session.timeout.ms": 6000, **more,
    }))


def create(topic, partitions):
    helix("topic", "create", topic, "--partitions", str(partitions), "--batch-format", "kafka")


def read_all(topic, partitions, count, **more):
    """Reads the values of each partition from its start."""
    reader = consumer(f"{topic}-reader", **more)
    reader.assign([confluent_kafka.TopicPartition(topic, p, 0) for p in range(partitions)])
    got, deadline = {p: [] for p in range(partitions)}, time.time() + DEADLINE
    while sum(map(len, got.values())) < count:
        expect(time.time() < deadline, f"{sum(map(len, got.values()))} of {count} records came")
        for message in reader.consume(1000, timeout=0.2):
            expect(not message.error(), f"{message.error()}")
            got[message.partition()].append((message.offset(), message.value()))
    # Doubles would follow.
    more = [message for message in reader.consume(10, timeout=0.5) if not message.error()]
    expect(not more, f"{len(more)} more records came")
    reader.close()
    return got


def failures():
    """Kills a gateway and the leader under an idempotent producer: no loss, double or disorder."""
    gateway_pid, port = int(ARGUMENTS[0]), ARGUMENTS[1]
    topic, partitions = "failures", 3
    create(topic, partitions)
    errors, stop = [], threading.Event()
    sent = {p: 0 for p in range(partitions)}
    producer = confluent_kafka.Producer(config(**{
        "enable.idempotence": True, "linger.ms": 5, "delivery.timeout.ms": 60000,
        "compression.codec": "lz4",
    }))

    def load():
        while not stop.is_set():
            for p in range(partitions):
                try:
                    producer.produce(
                        topic, partition=p, value=b"%d" % sent[p],
                        on_delivery=lambda error, _: errors.append(error) if error else None,
                    )
                    sent[p] += 1
                except BufferError:
                    pass
            producer.poll(0.002)

    loading = threading.Thread(target=load)
    loading.start()
    acked = lambda: sum(sent.values()) - len(producer)
    until("the load runs", lambda: acked() > 1000)
    os.kill(gateway_pid, signal.SIGKILL)
    before = acked()
    until("the load runs without a gateway", lambda: acked() > before + 1000)
    for _ in range(2):
        shards = json.loads(helix("cluster", "shards", "-o", "json"))
        leader = next(shard["leader"] for shard in shards if shard["shard_id"] == 1)
        helix("dev", "kill", str(leader), "--port", port)
        before = acked()
        until("the load runs after a leader", lambda: acked() > before + 1000)
        helix("dev", "restart", str(leader), "--port", port)
    stop.set()
    loading.join()
    left = producer.flush(60)
    expect(left == 0 and not errors, f"{left} records left, errors {errors[:3]}")
    total = sum(sent.values())
    for p, values in read_all(topic, partitions, total).items():
        expect(values == [(n, b"%d" % n) for n in range(sent[p])], f"partition {p} differs")
    print(f"failures: {total} records, none lost, doubled or reordered")


def seek():
    """Seeks a live group back: its member reads everything again."""
    topic, group, count = "sought", "sought-group", 300
    create(topic, 1)
    producer = confluent_kafka.Producer(config())
    for number in range(count):
        producer.produce(topic, value=b"%d" % number)
    expect(producer.flush(30) == 0, "records left")
    member = consumer(group)
    member.subscribe([topic])
    got = []

    def read(total):
        deadline = time.time() + DEADLINE
        while len(got) < total:
            expect(time.time() < deadline, f"{len(got)} of {total} records came")
            for message in member.consume(50, timeout=0.2):
                expect(not message.error(), f"{message.error()}")
                got.append(int(message.value()))
            try:
                member.commit(asynchronous=False)
            except confluent_kafka.KafkaException as error:
                # Nothing new, or the seek came first: the member joins again.
                expect(error.args[0].code() in (-168, 22, 27, 25), f"{error}")

    read(count)
    expect(got == list(range(count)), "other records")
    helix("group", "seek", group, topic, "--to", "earliest")
    # A commit finds that the offsets have changed.
    producer.produce(topic, value=b"%d" % count)
    expect(producer.flush(30) == 0, "a record left")
    read(2 * count + 2)
    again = got[got.index(count) + 1:] if got[count] == count else got[count:]
    expect(again == list(range(count + 1)), f"read again: {again[:5]} of {len(again)}")
    member.close()
    print(f"seek: {len(again)} records read again")


def mixed():
    """Native members and those of Kafka exclude each other, with words."""
    topic, group = "mixed", "mixed-group"
    create(topic, 2)
    member = consumer(group)
    member.subscribe([topic])
    until("a member has partitions", lambda: (member.poll(0.1), member.assignment())[1])

    def described():
        describe = [HELIX, "group", "describe", group, "-o", "json"]
        run = subprocess.run(describe, capture_output=True, timeout=DEADLINE)
        # Without members and commits the group does not exist.
        return json.loads(run.stdout) if run.returncode == 0 else {"members": [], "gateway": None}

    until("helix shows the partitions", lambda: (
        member.poll(0.1), sum(it["owned_count"] for it in described()["members"]) == 2)[1])
    listed = json.loads(helix("group", "list", "-o", "json"))
    row = next(row for row in listed if row["group"] == group)
    expect(row["member_count"] == 1 and row["gateway"], f"{row}")
    expect("as the gateway reports" in helix("group", "explain", group), "no explanation")
    refused = helix("consume", topic, "--group", group, "-n", "1", fails=True)
    expect("GROUP_NOT_EMPTY" in refused and row["gateway"] in refused, refused)
    member.close()
    native = subprocess.Popen(
        [HELIX, "consume", topic, "--group", group, "--follow"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    atexit.register(native.kill)
    until("a native member has joined", lambda: [
        it for it in described()["members"] if described()["gateway"] is None])
    member = consumer(group)
    member.subscribe([topic])

    def is_refused():
        message = member.poll(0.1)
        expect(message is None or message.error().code() == 23, f"{message and message.error()}")
        expect(not member.assignment(), "a Kafka member has joined")
        pages = [urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
                 for port in ARGUMENTS]
        refusal = 'helix_kafka_errors_total{api="JoinGroup",error="INCONSISTENT_GROUP_PROTOCOL"}'
        return any(refusal in page for page in pages)

    until("a Kafka member is refused", is_refused)
    member.close()
    native.send_signal(signal.SIGINT)
    native.wait(DEADLINE)
    print("mixed: each refuses the other")


def partitions():
    """Writes to and reads from a topic with many partitions, as a group too."""
    count = int(ARGUMENTS[0])
    topic = f"many-{count}"
    started = time.time()
    create(topic, count)
    created = time.time()
    errors = []
    producer = confluent_kafka.Producer(config(**{
        "enable.idempotence": True, "linger.ms": 50, "queue.buffering.max.messages": 1000000,
    }))
    for p in range(count):
        for number in range(2):
            producer.produce(
                topic, partition=p, value=b"%d.%d" % (p, number),
                on_delivery=lambda error, _: errors.append(error) if error else None,
            )
        producer.poll(0)
    expect(producer.flush(DEADLINE) == 0 and not errors, f"errors {errors[:3]}")
    written = time.time()
    for p, values in read_all(topic, count, 2 * count, **{"client.rack": "none"}).items():
        expect(values == [(n, b"%d.%d" % (p, n)) for n in range(2)], f"partition {p}: {values}")
    read = time.time()
    member = consumer(f"{topic}-group")
    member.subscribe([topic])
    got, deadline = 0, time.time() + DEADLINE
    while got < 2 * count:
        expect(time.time() < deadline, f"the group has read {got} of {2 * count}")
        got += len([it for it in member.consume(1000, timeout=0.2) if not it.error()])
    member.commit(asynchronous=False)
    member.close()
    lag = json.loads(helix("group", "describe", f"{topic}-group", "-o", "json"))["total_lag"]
    expect(lag == 0, f"lag {lag}")
    helix("topic", "delete", topic, "--yes")
    print(f"partitions: {count} created in {created - started:.1f} s, written in "
          f"{written - created:.1f} s, read in {read - written:.1f} s, by a group in "
          f"{time.time() - read:.1f} s")


def base64url(data):
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def login():
    """Logs in with TLS: PLAIN with a token, OAUTHBEARER with a JWT, and wrong credentials."""
    ca, token, key = ARGUMENTS
    tls = {"security.protocol": "SASL_SSL", "ssl.ca.location": ca}

    def jwt(sub, seconds):
        claims = {"iss": "clients", "aud": "helix", "sub": sub, "exp": int(time.time()) + seconds}
        parts = [{"alg": "EdDSA", "kid": "k", "typ": "JWT"}, claims]
        text = ".".join(base64url(json.dumps(part).encode()) for part in parts)
        path = f"{key}.input"
        with open(path, "w") as file:
            file.write(text)
        sign = ["openssl", "pkeyutl", "-sign", "-rawin", "-inkey", key, "-in", path]
        signature = subprocess.run(sign, capture_output=True, check=True).stdout
        # The client refuses to send an expired one.
        return f"{text}.{base64url(signature)}", time.time() + 300

    def plain(user, password):
        return {**tls, "sasl.mechanism": "PLAIN", "sasl.username": user, "sasl.password": password}

    def bearer(sub, seconds=300):
        return {**tls, "sasl.mechanism": "OAUTHBEARER", "oauth_cb": lambda _: jwt(sub, seconds)}

    def write(settings, value):
        """Returns the codes of errors, of the connection and of the record."""
        codes = []
        producer = confluent_kafka.Producer(config(**{
            **settings, "message.timeout.ms": 3000, "log_level": 2, "error_cb": lambda it: codes.append(it.code()),
        }))
        producer.produce("secret", value=value, on_delivery=lambda error, _: (
            codes.append(error.code()) if error else codes.append(0)))
        producer.flush(10)
        return codes

    for settings, value in [(plain("app", token), b"plain"), (bearer("app"), b"bearer")]:
        codes = write(settings, value)
        expect(codes == [0], f"{value}: {codes}")
    authentication, topic_authorization = -169, 29
    for what, settings, code in [
        ("a wrong token", plain("app", token[:-1] + "x"), authentication),
        ("a wrong user", plain("other", token), authentication),
        ("a JWT that is expired", bearer("app", -300), authentication),
        ("a principal without rights", bearer("stranger"), topic_authorization),
    ]:
        codes = write(settings, b"wrong")
        expect(0 not in codes and code in codes, f"{what}: {codes}")
    # Without TLS, and before a login.
    codes = write({"security.protocol": "PLAINTEXT"}, b"wrong")
    expect(codes and 0 not in codes, f"without TLS: {codes}")
    got = read_all("secret", 1, 2, **plain("app", token))
    expect([value for _, value in got[0]] == [b"plain", b"bearer"], f"{got}")
    print("login: PLAIN and OAUTHBEARER over TLS, five refusals")


def old():
    """Writes and reads as a client of Kafka 0.11: without ApiVersions, and no flexible version."""
    topic = "old"
    create(topic, 1)
    settings = {
        "api.version.request": False, "broker.version.fallback": "0.11.0.0", "log_level": 2,
    }
    producer = confluent_kafka.Producer(config(**settings))
    for number in range(100):
        producer.produce(topic, key=b"k", value=b"%d" % number, headers=[("h", b"1")])
    expect(producer.flush(30) == 0, "records left")
    got = read_all(topic, 1, 100, **settings)[0]
    expect(got == [(n, b"%d" % n) for n in range(100)], f"{got[:3]}")
    print("old: 100 records with the versions of 0.11")


{
    "failures": failures, "seek": seek, "mixed": mixed, "partitions": partitions, "login": login,
    "old": old,
}[SCENARIO]()
