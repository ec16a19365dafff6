#!/usr/bin/env ruby
# frozen_string_literal: true

# Produces, and consumes in a group of three members, while a leader is killed and restarted, with
# generated stubs and no client library.
#
# Usage: groups.rb PATH_TO_HELIX. Needs Debian's ruby-grpc and ruby-grpc-tools. Starts and stops a
# local cluster of its own.
require "grpc"
require "securerandom"
require "set"
require "socket"
require "tmpdir"

PROTOS = File.expand_path("../../helix-proto/proto", __dir__)
TOPIC, GROUP, PARTITIONS, MEMBERS, NODES = "orders", "billing", 6, 3, 3
BATCHES, BATCH_RECORDS, SESSION, TIME_MAX = 150, 10, 5, 60 # seconds

def generate(directory)
  files = Dir.glob("helix/log/v1/*.proto", base: PROTOS)
  command = ["grpc_tools_ruby_protoc", "-I", PROTOS, "--ruby_out=#{directory}", "--grpc_out=#{directory}"]
  system(*command, *files, exception: true)
  $LOAD_PATH.unshift(directory)
  %w[produce consume topic group].each { |it| require "helix/log/v1/#{it}_service_services_pb" }
end

def now = Process.clock_gettime(Process::CLOCK_MONOTONIC)

# A call that a retry does not help, or that found no leader in time.
class Failed < StandardError; end

# Sends calls to the nodes that lead, and follows them as they move. Each thread has its own.
class Client
  RETRIED = %w[NOT_LEADER NO_LEADER DRAINING OUTCOME_UNKNOWN THROTTLED].freeze

  attr_reader :leaders

  def initialize(nodes)
    @nodes, @leaders, @stubs = nodes, {}, {}
  end

  # Repeats a call until it succeeds: with sequences and ids, a copy has no effect.
  def call(service, method, request, key: nil, limit: 20)
    deadline = now + limit
    loop do
      address = @leaders[key] || @nodes.sample
      @leaders[key] = address
      return stub(service, address).public_send(method, request, deadline: Time.now + 2)
    rescue GRPC::BadStatus => error
      reason = error.metadata["helix-reason"] # Without one, the error is of this library.
      transient = error.is_a?(GRPC::Unavailable) || error.is_a?(GRPC::DeadlineExceeded)
      raise Failed, error.message if now > deadline || !(reason ? RETRIED.include?(reason) : transient)

      @leaders[key] = error.metadata["helix-leader-endpoint"]
      sleep 0.05 unless @leaders[key] # An election takes about a second.
    end
  end

  private

  def stub(service, address)
    @stubs[[service, address]] ||=
      Helix::Log::V1.const_get(service)::Stub.new(address, :this_channel_is_insecure)
  end
end

# Appends batches with sequences, and returns the values.
def produce(client)
  v1 = Helix::Log::V1
  producer = client.call(:ProduceService, :init_producer, v1::InitProducerRequest.new).producer
  sequences, values = Array.new(PARTITIONS, 0), Set.new
  BATCHES.times do |batch|
    yield batch
    partition = batch % PARTITIONS
    written = Array.new(BATCH_RECORDS) { |record| "#{batch}/#{record}" }
    records = v1::RecordList.new(records: written.map { |it| v1::Record.new(value: it.b) })
    client.call(:ProduceService, :append, v1::AppendRequest.new(
      topic: TOPIC, partition: partition, batch: v1::Batch.new(records: records),
      producer: producer, first_sequence: sequences[partition]
    ), key: partition)
    sequences[partition] += written.size
    values.merge(written)
  end
  values
end

# A member: sends heartbeats, reads what they assign, and commits what it has handled.
def consume(client, results, stopped)
  v1, member_id = Helix::Log::V1, SecureRandom.uuid
  epoch, owned, positions = 0, [], {}
  until stopped.set?
    beat = v1::HeartbeatRequest.new(
      group: GROUP, member_id: member_id, member_epoch: epoch, topics: [TOPIC], owned: owned,
      session_timeout: Google::Protobuf::Duration.new(seconds: SESSION),
      max_wait: Google::Protobuf::Duration.new(nanos: 50_000_000)
    )
    begin
      beat = client.call(:GroupService, :heartbeat, beat, key: GROUP, limit: SESSION)
    rescue Failed # Removed, or without a response for a session: join again.
      epoch, owned, positions = 0, [], {}
      next
    end
    # Everything handled is committed, so the next heartbeat releases what is not assigned.
    epoch, owned = beat.member_epoch, beat.assigned.to_a
    positions = owned.to_h { |it| [it.partition, positions[it.partition]] }
    begin
      owned.each { |it| read(client, it, positions, results, [member_id, epoch]) }
    rescue Failed => failed # Another heartbeat first: these records may be read again.
      warn "fetch or commit failed: #{failed.message}"
    end
  end
  client.call(:GroupService, :leave, v1::LeaveRequest.new(group: GROUP, member_id: member_id), key: GROUP)
end

# Reads a partition once, hands the records over, and commits.
def read(client, partition, positions, results, (member_id, epoch))
  v1, number = Helix::Log::V1, partition.partition
  at = positions[number]
  start = at ? v1::StartPosition.new(offset: at) : v1::StartPosition.new(committed_group: GROUP)
  wanted = v1::PartitionStart.new(topic: TOPIC, partition: number, topic_id: partition.topic_id, start: start)
  request = v1::FetchRequest.new(partitions: [wanted])
  found = client.call(:ConsumeService, :fetch, request, key: number, limit: SESSION).partitions.first
  return if found.records.empty?

  results << found.records.map { |it| it.record.value }
  offset = v1::CommittedOffset.new(partition: partition, offset: found.next_offset)
  client.call(:GroupService, :commit_offsets, v1::CommitOffsetsRequest.new(
    group: GROUP, member_id: member_id, member_epoch: epoch, offsets: [offset]
  ), key: GROUP, limit: SESSION)
  positions[number] = found.next_offset
end

# A flag that threads share.
class Flag
  def set = @set = true

  def set? = @set
end

# Returns a port for `helix dev`: clients, and peers and the admin page at distances.
def free_port
  port = rand(20_000...30_000)
  [0, 100, 552].product([*0...NODES]) { |at, node| TCPServer.new("127.0.0.1", port + at + node).close }
  port
rescue SystemCallError
  retry
end

def run(nodes, deadline, dev)
  v1, client = Helix::Log::V1, Client.new(nodes)
  topic = v1::CreateTopicRequest.new(name: TOPIC, partition_count: PARTITIONS)
  client.call(:TopicService, :create_topic, topic)
  results, stopped, killed = Queue.new, Flag.new, nil
  members = Array.new(MEMBERS) { Thread.new { consume(Client.new(nodes), results, stopped) } }
  missing = produce(client) do |batch|
    if batch == BATCHES / 3
      killed = (nodes.index(client.leaders[0]) + 1).to_s
      dev.call("kill", killed)
    elsif batch == BATCHES * 2 / 3
      dev.call("restart", killed)
    end
  end
  copies = 0
  until missing.empty?
    raise "#{missing.size} records were not read" if now > deadline

    results.empty? ? sleep(0.02) : results.pop.each { |it| missing.delete?(it) || copies += 1 }
  end
  stopped.set
  members.each(&:join)
  request = v1::GetOffsetsRequest.new(group: GROUP)
  lag = client.call(:GroupService, :get_offsets, request, key: GROUP).offsets.sum(&:lag)
  raise "#{lag} records are not committed" unless lag.zero?

  puts "#{BATCHES * BATCH_RECORDS} records read by #{MEMBERS} members, #{copies} of them twice; " \
       "node #{killed} was killed and restarted"
end

def main(helix)
  port, deadline = free_port, now + TIME_MAX
  dev = ->(*words) { system(helix, "dev", *words, "--port", port.to_s, exception: true, out: File::NULL) }
  Dir.mktmpdir do |directory|
    generate(directory)
    cluster = spawn(helix, "dev", "--port", port.to_s, "--dir", "#{directory}/data", out: File::NULL)
    begin
      run(Array.new(NODES) { |node| "127.0.0.1:#{port + node}" }, deadline, dev)
    ensure
      Process.kill(:TERM, cluster)
      Process.wait(cluster)
    end
  end
end

main(ARGV.fetch(0))
