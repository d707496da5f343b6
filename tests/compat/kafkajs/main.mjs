// KafkaJS: the adapter that the shared scenarios run against.

import { createRequire } from 'node:module'
import { setTimeout as sleep } from 'node:timers/promises'
import kafkajs from 'kafkajs'
import snappy from 'kafkajs-snappy'
import lz4 from 'lz4js'
import zstd from 'zstd-codec'
import { allOf, Ownership } from '../node/journal.mjs'
import { assert, main, scenario } from '../node/suite.mjs'

const { AssignerProtocol, CompressionCodecs, CompressionTypes, ConfigResourceTypes, Kafka, logLevel, PartitionAssigners } =
  kafkajs
const require = createRequire(import.meta.url)

// KafkaJS itself has only gzip. Its users register the other codecs, which are written in plain JavaScript or
// WebAssembly.
const zstdSimple = new Promise(resolve => zstd.ZstdCodec.run(binding => resolve(new binding.Simple())))
CompressionCodecs[CompressionTypes.Snappy] = snappy
CompressionCodecs[CompressionTypes.LZ4] = () => ({
  compress: async encoder => Buffer.from(lz4.compress(encoder.buffer)),
  decompress: async buffer => Buffer.from(lz4.decompress(buffer))
})
CompressionCodecs[CompressionTypes.ZSTD] = () => ({
  compress: async encoder => Buffer.from((await zstdSimple).compress(encoder.buffer)),
  decompress: async buffer => Buffer.from((await zstdSimple).decompress(buffer))
})
const CODECS = {
  none: CompressionTypes.None,
  gzip: CompressionTypes.GZIP,
  snappy: CompressionTypes.Snappy,
  lz4: CompressionTypes.LZ4,
  zstd: CompressionTypes.ZSTD
}

/**
 * A custom assigner, as users of KafkaJS write them: it assigns partition 0 of each topic to the first member, and so
 * on.
 */
const inOrder = ({ cluster }) => ({
  name: 'in-order',
  version: 1,
  async assign({ members, topics }) {
    const names = members.map(({ memberId }) => memberId).sort()
    const assignments = new Map(names.map(name => [name, {}]))
    for (const topic of topics) {
      const partitions = cluster.findTopicPartitionMetadata(topic).map(({ partitionId }) => partitionId)
      for (const [index, partition] of partitions.sort((one, other) => one - other).entries()) {
        const held = assignments.get(names[index % names.length])
        ;(held[topic] ??= []).push(partition)
      }
    }
    return names.map(memberId => ({
      memberId,
      memberAssignment: AssignerProtocol.MemberAssignment.encode({ version: 1, assignment: assignments.get(memberId) })
    }))
  },
  protocol: ({ topics }) => ({
    name: 'in-order',
    metadata: AssignerProtocol.MemberMetadata.encode({ version: 1, topics })
  })
})
const ASSIGNERS = {
  roundrobin: [PartitionAssigners.roundRobin],
  'in-order': [inOrder],
  both: [inOrder, PartitionAssigners.roundRobin]
}

const LOG_LEVEL = logLevel[process.env.COMPAT_LOG_LEVEL ?? 'ERROR']
const CONSUMER = {
  sessionTimeout: 6000,
  rebalanceTimeout: 10_000,
  heartbeatInterval: 300,
  maxWaitTimeInMs: 100,
  metadataMaxAge: 500,
  retry: { initialRetryTime: 100, retries: 8, maxRetryTime: 1000 }
}

const POLL_MS = 100

const toStderr = () => entry => {
  const { message, ...more } = entry.log
  process.stderr.write(`${more.timestamp} ${entry.namespace} ${message} ${more.error ?? ''}\n`)
}

class Member {
  constructor(kafka, options, journal, failed) {
    this.ownership = new Ownership(journal, options.name)
    this.name = options.name
    this.options = options
    this.failed = failed
    this.joined = false
    this.consumer = kafka.consumer({
      ...CONSUMER,
      sessionTimeout: options.sessionTimeoutMs ?? CONSUMER.sessionTimeout,
      groupId: options.group,
      allowAutoTopicCreation: false,
      partitionAssigners: ASSIGNERS[options.assignor]
    })
    const { GROUP_JOIN, REBALANCING, CRASH } = this.consumer.events
    this.consumer.on(REBALANCING, () => this.givenUp('revoked'))
    this.consumer.on(GROUP_JOIN, ({ payload }) => {
      // A member that was expelled joins again without a REBALANCING event, so its earlier partitions are lost.
      this.givenUp('lost')
      const partitions = Object.entries(payload.memberAssignment).flatMap(([topic, indexes]) =>
        indexes.map(partition => ({ topic, partition }))
      )
      this.protocol = payload.groupProtocol
      this.ownership.assigned(partitions)
      this.joined = true
    })
    this.consumer.on(CRASH, ({ payload }) => {
      this.givenUp('lost')
      if (!payload.restart) failed(payload.error)
    })
  }

  givenUp(event) {
    this.joined = false
    this.ownership.all(event)
  }

  start() {
    this.started = this.run().catch(this.failed)
  }

  async run() {
    await this.consumer.connect()
    await this.subscribe(this.options.pattern ? [new RegExp(this.options.pattern)] : this.options.topics)
  }

  async subscribe(topics) {
    await this.consumer.subscribe({ topics, fromBeginning: true })
    await this.consumer.run({
      autoCommit: false,
      eachBatchAutoResolve: false,
      eachBatch: payload => this.process(payload)
    })
  }

  /**
   * Subscribes to more topics. KafkaJS requires the consumer to stop first, which leaves the group. The next run adds
   * the topics to the earlier subscription.
   */
  async addTopics(topics) {
    await this.consumer.stop()
    this.givenUp('revoked')
    await this.subscribe(topics)
  }

  async process({ batch, resolveOffset, commitOffsetsIfNecessary, isRunning, isStale }) {
    const { topic, partition } = batch
    if (!this.joined || !isRunning() || isStale() || !this.ownership.owns(topic, partition)) return
    for (const message of batch.messages) {
      this.ownership.delivered(topic, partition, message.offset)
      resolveOffset(message.offset)
    }
    const offset = String(BigInt(batch.lastOffset()) + 1n)
    await commitOffsetsIfNecessary({ topics: [{ topic, partitions: [{ partition, offset }] }] })
  }

  async stop() {
    if (this.stopped) return
    this.stopped = true
    await this.started
    await this.consumer.disconnect()
    this.givenUp('revoked')
    this.ownership.closed()
  }
}

class Reader {
  constructor(kafka, topic, where, { group, readCommitted = false } = {}) {
    this.consumer = kafka.consumer({
      ...CONSUMER,
      groupId: group ?? `reader-${process.pid}-${performance.now()}`,
      readUncommitted: !readCommitted
    })
    this.records = []
    this.last = new Map()
    this.topic = topic
    this.where = where
  }

  async open() {
    await this.consumer.connect()
    await this.consumer.subscribe({ topics: [this.topic], fromBeginning: this.where !== 'latest' })
    // Seek before the first fetch, because a fetch that is under way would still deliver its records.
    this.consumer.on(this.consumer.events.GROUP_JOIN, () => {
      if (Number.isInteger(this.where)) {
        this.consumer.seek({ topic: this.topic, partition: 0, offset: String(this.where) })
      }
    })
    const fetched = this.once(this.consumer.events.FETCH)
    await this.consumer.run({
      autoCommit: false,
      eachMessage: async ({ partition, message }) => {
        // This consumer commits nothing. If it has to join again, for example because the coordinator moves, it
        // receives all records again. Ignore these.
        const offset = Number(message.offset)
        if (offset <= (this.last.get(partition) ?? -1)) return
        this.last.set(partition, offset)
        this.records.push({ partition, ...message })
      }
    })
    await fetched
    return this
  }

  once(event) {
    return new Promise(resolve => {
      const remove = this.consumer.on(event, () => {
        remove()
        resolve()
      })
    })
  }

  /** Returns the next `count` records, or fewer if they do not arrive in time. */
  async read(count, milliseconds = Infinity) {
    const deadline = Date.now() + milliseconds
    while (this.records.length < count && Date.now() < deadline) {
      await Promise.race([this.once(this.consumer.events.FETCH_START), sleep(POLL_MS)])
    }
    return this.records.splice(0, count).map(({ partition, offset, timestamp, key, value, headers }) => ({
      partition,
      offset: Number(offset),
      timestamp: Number(timestamp),
      key,
      value,
      headers: Object.entries(headers ?? {}).flatMap(([name, held]) =>
        (Array.isArray(held) ? held : [held]).map(one => [name, one])
      )
    }))
  }

  close() {
    return this.consumer.disconnect()
  }
}

class Client {
  constructor(bootstrap) {
    this.kafka = new Kafka({
      clientId: 'compat',
      brokers: [bootstrap],
      connectionTimeout: 5000,
      retry: { initialRetryTime: 100, retries: 8, maxRetryTime: 1000 },
      logLevel: LOG_LEVEL,
      logCreator: toStderr
    })
  }

  async admin() {
    if (!this.connected) {
      this.connected = this.kafka.admin()
      await this.connected.connect()
    }
    return this.connected
  }

  async close() {
    await this.connected?.disconnect()
  }

  async producer({ codec = 'none', idempotent = false }) {
    const producer = this.kafka.producer({ idempotent, maxInFlightRequests: 5, allowAutoTopicCreation: false })
    await producer.connect()
    return {
      close: () => producer.disconnect(),
      async send(topic, records) {
        const messages = records.map(({ partition, key, value, headers, timestamp }) => ({
          partition,
          key,
          value,
          headers: asObject(headers),
          timestamp: timestamp === undefined ? undefined : String(timestamp)
        }))
        const answers = await producer.send({ topic, acks: -1, compression: CODECS[codec], messages })
        const next = new Map(answers.map(answer => [answer.partition, Number(answer.baseOffset)]))
        return records.map(({ partition }) => {
          const offset = next.get(partition)
          next.set(partition, offset + 1)
          return offset
        })
      }
    }
  }

  reader(topic, where, options) {
    return new Reader(this.kafka, topic, where, options).open()
  }

  /** Returns a reader that is a member of the group and commits nothing. */
  groupReader(group, topic) {
    return new Reader(this.kafka, topic, 'earliest', { group, readCommitted: true }).open()
  }

  async transactional(transactionalId, { timeout = 60_000 } = {}) {
    const producer = this.kafka.producer({
      transactionalId,
      transactionTimeout: timeout,
      idempotent: true,
      maxInFlightRequests: 1,
      allowAutoTopicCreation: false
    })
    await producer.connect()
    let transaction
    return {
      // If a transaction is open already, it continues.
      async begin() {
        if (!transaction?.isActive()) transaction = await producer.transaction()
      },
      async send(topic, messages) {
        await transaction.send({ topic, acks: -1, messages })
      },
      async sendOffsets(reader, consumerGroupId, found) {
        const offsets = new Map(found.map(({ partition, offset }) => [partition, String(offset + 1)]))
        const partitions = [...offsets].map(([partition, offset]) => ({ partition, offset }))
        await transaction.sendOffsets({ consumerGroupId, topics: [{ topic: reader.topic, partitions }] })
      },
      commit: () => transaction.commit(),
      abort: () => transaction.abort(),
      close: () => producer.disconnect()
    }
  }

  isFenced(error) {
    return ['PRODUCER_FENCED', 'INVALID_PRODUCER_EPOCH'].includes(error.type)
  }

  member(options, journal, failed) {
    return new Member(this.kafka, options, journal, failed)
  }

  /** Returns the first offset and the last stable offset, because KafkaJS sends ListOffsets with read_committed. */
  async bounds(topic) {
    const [{ low, high }] = await (await this.admin()).fetchTopicOffsets(topic)
    return [Number(low), Number(high)]
  }

  async offsetAt(topic, timestamp) {
    const [{ offset }] = await (await this.admin()).fetchTopicOffsetsByTimestamp(topic, timestamp)
    return Number(offset)
  }

  async deleteRecords(topic, before) {
    await this.bounds(topic) // loads the topic's leaders, without which KafkaJS refuses to delete records
    await (await this.admin()).deleteTopicRecords({ topic, partitions: [{ partition: 0, offset: String(before) }] })
  }

  async createTopic(topic, numPartitions) {
    const created = await (await this.admin()).createTopics({ topics: [{ topic, numPartitions }] })
    assert(created, `${topic} exists`)
  }

  /** Asserts that a topic cannot be created again. KafkaJS then returns false and does not throw. */
  async createsTwice(topic) {
    const created = await (await this.admin()).createTopics({ topics: [{ topic, numPartitions: 1 }] })
    assert(created === false, 'a topic was created twice')
  }

  async partitions(topic) {
    const admin = await this.admin()
    if (!(await admin.listTopics()).includes(topic)) return 0
    return (await admin.fetchTopicMetadata({ topics: [topic] })).topics[0].partitions.length
  }

  async addPartitions(topic, count) {
    await (await this.admin()).createPartitions({ topicPartitions: [{ topic, count }] })
  }

  async deleteTopic(topic) {
    await (await this.admin()).deleteTopics({ topics: [topic] })
  }

  async topicConfig(topic, name) {
    const resources = [{ type: ConfigResourceTypes.TOPIC, name: topic }]
    const described = await (await this.admin()).describeConfigs({ resources, includeSynonyms: false })
    return described.resources[0].configEntries.find(({ configName }) => configName === name)?.configValue
  }

  async setTopicConfig(topic, name, value) {
    const resources = [{ type: ConfigResourceTypes.TOPIC, name: topic, configEntries: [{ name, value }] }]
    await (await this.admin()).alterConfigs({ validateOnly: false, resources })
  }

  async groups() {
    return (await (await this.admin()).listGroups()).groups.map(({ groupId }) => groupId)
  }

  async describeGroup(group) {
    const { state, members } = (await (await this.admin()).describeGroups([group])).groups[0]
    return { state, members: members.length, clientIds: members.map(({ clientId }) => clientId) }
  }

  async deleteGroup(group) {
    await (await this.admin()).deleteGroups([group])
  }

  async committed(group, topic, count) {
    const [{ partitions }] = await (await this.admin()).fetchOffsets({ groupId: group, topics: [topic] })
    const offsets = new Map(partitions.map(({ partition, offset }) => [partition, Number(offset)]))
    return Array.from({ length: count }, (_, partition) => offsets.get(partition) ?? -1)
  }

  async commit(group, topic, offsets) {
    const partitions = offsets.map((offset, partition) => ({ partition, offset: String(offset) }))
    await (await this.admin()).setOffsets({ groupId: group, topic, partitions })
  }
}

function asObject(headers) {
  const held = {}
  for (const [name, value] of headers ?? []) (held[name] ??= []).push(value)
  return held
}

scenario('groups.offset-out-of-range', async run => {
  // On OFFSET_OUT_OF_RANGE, KafkaJS commits −2 or −1 as an offset and continues at its default offset.
  const topic = await run.topic(1)
  const group = run.group()
  const view = run.log({ topic, partitions: 1 })
  await run.produce(topic, 1, 5)
  await run.client.commit(group, topic, [1000])
  const member = run.start({ name: 'c1', group, topics: [topic] })
  await view.waitCaughtUp()
  await member.stop()
  assert((await run.client.committed(group, topic, 1))[0] === 5, 'committed 5')
})

scenario('groups.regex-at-start', async run => {
  // KafkaJS resolves a pattern only once, when it subscribes: to the topics that exist then, and to no later ones.
  const prefix = `re-${run.group()}`
  const first = await run.topic(2, { name: `${prefix}-a1` })
  const second = await run.topic(2, { name: `${prefix}-b1` })
  await run.topic(2, { name: `${prefix}-c1` })
  const view = run.log({ topic: first, partitions: 2 })
  const member = run.start({ name: 'c1', group: run.group(), pattern: `^${prefix}-[ab]` })
  await view.waitSettled(['c1'], [...allOf(first, 2), ...allOf(second, 2)])
  await run.produce(first, 2, 5)
  await run.produce(second, 2, 5)
  await view.waitCaughtUp()
  await member.stop()
})

scenario('groups.subscription-change-by-restart', async run => {
  const old = await run.topic(2, { prefix: 'old' })
  const fresh = await run.topic(2, { prefix: 'new' })
  const group = run.group()
  const view = run.log({ topic: old, partitions: 2 })
  const steady = run.start({ name: 'steady', group, topics: [old] })
  const changing = run.start({ name: 'changing', group, topics: [old] })
  await view.waitSettled(['steady', 'changing'], allOf(old, 2))
  await run.produce(old, 2, 5)
  await view.waitCaughtUp()
  await changing.addTopics([fresh])
  // KafkaJS' only assigner assigns the topics of the leader's subscription to any member, so both members subscribe.
  await steady.addTopics([fresh])
  await view.waitSettled(['steady', 'changing'], [...allOf(old, 2), ...allOf(fresh, 2)])
  await run.produce(old, 2, 5)
  await run.produce(fresh, 2, 5)
  await view.waitCaughtUp()
  for (const member of [changing, steady]) await member.stop()
})

scenario('groups.own-assigner', async run => {
  // Rolling bounces change the group from KafkaJS' own assigner to a custom one. The group uses an assigner that all
  // its members have.
  const topic = await run.topic(4)
  const group = run.group()
  const view = run.log({ topic, partitions: 4 })
  const all = allOf(topic, 4)
  let members = []
  for (const [assignor, expected] of [
    ['roundrobin', 'RoundRobinAssigner'],
    ['both', 'in-order'],
    ['in-order', 'in-order']
  ]) {
    const next = [`${assignor} 1`, `${assignor} 2`].map(name => ({ name, group, topics: [topic], assignor }))
    for (const options of next) {
      const old = members.shift()
      if (old) await old.stop()
      const member = run.start(options)
      members.push(member)
      await view.waitSettled(members.map(({ name }) => name), all)
      await run.produce(topic, 4, 3)
      await view.waitCaughtUp()
    }
    for (const { name, protocol } of members) assert(protocol === expected, `${name} has ${protocol}`)
  }
  for (const member of members) await member.stop()
})

await main({
  suite: process.env.COMPAT_SUITE ?? 'kafkajs',
  version: require('kafkajs/package.json').version,
  // The name of KafkaJS' only assignor is RoundRobinAssigner.
  assignors: ['roundrobin'],
  codecs: { none: true, gzip: true, snappy: true, lz4: true, zstd: true },
  headers: { repeated: true, nulls: false },
  overlapsIdempotence: true,
  skips: {
    'groups.commit-in-revoke': 'it has no revoke callback: it rejoins without waiting for who listens to REBALANCING',
    'groups.static-members': 'it has no group.instance.id',
    'groups.topic-deleted':
      'it crashes and restarts without end: as long as one of its topics is unknown it takes no metadata of the others',
    'groups.regex': 'it resolves a pattern once, when it subscribes; groups.regex-at-start shows that',
    'groups.subscription-change':
      'it refuses to subscribe while it runs, and stopping leaves the group; groups.subscription-change-by-restart does',
    'groups.connect-and-sr': 'it joins with the protocol type consumer alone'
  },
  client: bootstrap => new Client(bootstrap)
})
