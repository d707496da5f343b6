// @platformatic/kafka: the adapter that the shared scenarios run against.

import { readFileSync } from 'node:fs'
import { setTimeout as sleep } from 'node:timers/promises'
import * as kafka from '@platformatic/kafka'
import { allOf, Ownership } from '../node/journal.mjs'
import { assert, main, scenario, waitUntil } from '../node/suite.mjs'

const { Admin, compressionsAlgorithms, ConfigResourceTypes, Connection, Consumer, FetchIsolationLevels, Producer } = kafka
const library = JSON.parse(readFileSync(new URL('node_modules/@platformatic/kafka/package.json', import.meta.url)))

const SESSION_MS = 6000
const FETCH = { maxWaitTime: 100, minBytes: 1 }
// A member that was expelled repeats each of its commits until this limit, one commit after the other, before it joins
// again.
const MEMBER_RETRIES = 5
// How often a member opens a stream during an outage. The client itself retries only for a second, and a restart of the
// broker lasts longer.
const OUTAGE_ATTEMPTS = 20
const BASE = { clientId: 'compat', retries: 20, retryDelay: 200, timeout: 20_000, metadataMaxAge: 500 }

/** Calls a function with a callback, and returns a promise of the result. */
const promised = call =>
  new Promise((resolve, reject) => call((error, result) => (error ? reject(error) : resolve(result))))

class Member {
  constructor(bootstrap, options, journal, failed) {
    this.name = options.name
    this.ownership = new Ownership(journal, options.name)
    this.topics = options.topics
    this.failed = failed
    this.fenced = false
    /** The partitions that the group still assigns to the member, but that it does not read because a fetch failed. */
    this.interrupted = []
    this.streams = new Set()
    this.consumer = new Consumer({
      ...BASE,
      retries: MEMBER_RETRIES,
      bootstrapBrokers: [bootstrap],
      groupId: options.group,
      groupInstanceId: options.instanceId,
      sessionTimeout: options.sessionTimeoutMs ?? SESSION_MS,
      rebalanceTimeout: Math.max(10_000, options.sessionTimeoutMs ?? 0),
      heartbeatInterval: 300
    })
    this.consumer.on('consumer:group:rebalance', () => this.givenUp('revoked'))
    this.consumer.on('consumer:group:join', ({ assignments }) => {
      // A member that was expelled joins again without a rebalance event, so its earlier partitions are lost.
      this.givenUp('lost')
      this.interrupted = []
      this.ownership.assigned(
        assignments.flatMap(({ topic, partitions }) => partitions.map(partition => ({ topic, partition })))
      )
      if (this.opened) this.renewPatiently().catch(failed)
    })
    this.consumer.on('consumer:heartbeat:error', ({ error }) => this.heartbeatFailed(error))
    this.consumer.on('error', error => this.heartbeatFailed(error))
  }

  heartbeatFailed(error) {
    if (error.findBy?.('apiId', 'FENCED_INSTANCE_ID')) {
      this.fenced = true
      this.givenUp('lost')
      if (!this.mayBeFenced) this.failed(error)
    }
  }

  expectsFencing() {
    this.mayBeFenced = true
  }

  givenUp(event) {
    this.current = null
    if (event === 'revoked') this.interrupted = []
    this.ownership.all(event)
  }

  start() {
    this.started = this.renew().then(
      () => {
        this.opened = true
      },
      error => this.failed(error)
    )
  }

  /**
   * Opens a new stream for each generation, because a stream keeps its position and the records that it fetched before
   * a rebalance. The new stream is opened before the old ones are closed, so that the consumer keeps its topics and
   * does not join once more.
   */
  async renew() {
    const earlier = [...this.streams]
    const stream = await this.consumer.consume({
      ...FETCH,
      topics: this.topics,
      mode: 'committed',
      fallbackMode: 'earliest',
      autocommit: false
    })
    this.streams.add(stream)
    stream.on('error', error => this.streamFailed(stream, error))
    if (this.stopped) return
    this.current = stream
    this.ownership.assigned(this.interrupted)
    this.interrupted = []
    stream.on('data', message => this.process(stream, message))
    for (const old of earlier) this.drop(old)
  }

  /** Opens a new stream, and tries again as an application does during an outage of its broker. */
  async renewPatiently() {
    for (let attempt = 1; ; attempt++) {
      try {
        return await this.renew()
      } catch (error) {
        // A member that closes during a rebalance still joins once more, and its consumer then refuses a new stream.
        if (this.stopped) return
        if (attempt === OUTAGE_ATTEMPTS || this.fenced) throw error
        process.stderr.write(`${this.name}: opening a stream: ${error.message}\n`)
      }
      await sleep(200)
      if (this.stopped || this.current) return
    }
  }

  streamFailed(stream, error) {
    this.streams.delete(stream)
    if (this.current !== stream || this.stopped || this.fenced) return
    process.stderr.write(`${this.name}: stream: ${error.stack}\n`)
    // A stream ends with its first failed fetch, for example in an outage. The next stream begins at the committed
    // offsets, so the member reads uncommitted records again. So the log says that the member loses its partitions and
    // is assigned them again.
    this.interrupted = [...this.interrupted, ...this.ownership.owned.values()]
    this.givenUp('lost')
    sleep(200).then(() => (this.stopped || this.current ? undefined : this.renewPatiently())).catch(this.failed)
  }

  drop(stream) {
    this.streams.delete(stream)
    stream.close().catch(error => process.stderr.write(`${this.name}: closing a stream: ${error.message}\n`))
  }

  process(stream, message) {
    const { topic, partition, offset } = message
    if (stream !== this.current || !this.ownership.owns(topic, partition)) return
    this.ownership.delivered(topic, partition, offset)
    this.pending = message.commit()
    this.pending.catch(error => process.stderr.write(`${this.name}: commit: ${error.message}\n`))
  }

  async changeTopics(topics) {
    this.topics = topics
    this.opened = false
    this.givenUp('revoked')
    // Closing the streams removes their topics from the subscription. A topic that is new to the subscription makes the
    // consumer join again.
    for (const stream of [...this.streams]) {
      this.streams.delete(stream)
      await stream.close()
    }
    await this.renew()
    this.opened = true
  }

  async stop() {
    if (this.stopped) return
    this.stopped = true
    await this.started
    const { current } = this
    await this.pending?.catch(() => {})
    this.current = null
    if (current) await current.close()
    await this.consumer.close(true)
    this.ownership.all('revoked')
    this.ownership.closed()
  }
}

class Reader {
  constructor(bootstrap, topic, where, { group, readCommitted = false } = {}) {
    const groupId = group ?? `reader-${process.pid}-${performance.now()}`
    const isolationLevel = FetchIsolationLevels[readCommitted ? 'READ_COMMITTED' : 'READ_UNCOMMITTED']
    this.consumer = new Consumer({
      ...BASE,
      bootstrapBrokers: [bootstrap],
      groupId,
      sessionTimeout: SESSION_MS,
      isolationLevel
    })
    const place = Number.isInteger(where)
      ? { mode: 'manual', offsets: [{ topic, partition: 0, offset: BigInt(where) }] }
      : { mode: where, fallbackMode: 'earliest' }
    this.options = { ...FETCH, topics: [topic], autocommit: false, ...place }
  }

  async open() {
    this.stream = await this.consumer.consume(this.options)
    this.records = this.stream[Symbol.asyncIterator]()
    if (this.options.mode === 'latest') await new Promise(resolve => this.stream.once('offsets', resolve))
    return this
  }

  /** Returns the next `count` records, or fewer if they do not arrive in time. */
  async read(count, milliseconds) {
    const records = []
    const late = milliseconds === undefined ? new Promise(() => {}) : sleep(milliseconds)
    while (records.length < count) {
      this.next ??= this.records.next()
      const next = await Promise.race([this.next, late])
      if (!next) break
      this.next = undefined
      const { value: message, done } = next
      assert(!done, 'the stream has ended')
      records.push({
        message,
        partition: message.partition,
        offset: Number(message.offset),
        timestamp: Number(message.timestamp),
        key: message.key ?? null,
        value: message.value ?? null,
        headers: [...message.headers].map(([name, value]) => [String(name), value ?? null])
      })
    }
    return records
  }

  async close() {
    await this.consumer.close(true)
  }
}

class Client {
  constructor(bootstrap) {
    this.bootstrap = bootstrap
    this.options = { ...BASE, bootstrapBrokers: [bootstrap] }
    this.admin = new Admin(this.options)
  }

  async close() {
    await this.admin.close()
  }

  producer({ codec = 'none', idempotent = false }) {
    const producer = new Producer({ ...this.options, idempotent, compression: codec, acks: -1 })
    return {
      close: () => producer.close(),
      async send(topic, records) {
        const messages = records.map(({ headers, timestamp, ...record }) => ({
          topic,
          ...record,
          headers: new Map((headers ?? []).map(([name, value]) => [Buffer.from(name), value])),
          timestamp: timestamp === undefined ? undefined : BigInt(timestamp)
        }))
        const { offsets } = await producer.send({ messages })
        const next = new Map(offsets.map(({ partition, offset }) => [partition, Number(offset)]))
        return records.map(({ partition }) => {
          const offset = next.get(partition)
          next.set(partition, offset + 1)
          return offset
        })
      }
    }
  }

  reader(topic, where, options) {
    return new Reader(this.bootstrap, topic, where, options).open()
  }

  /** Returns a reader that is a member of the group and commits nothing. */
  groupReader(group, topic) {
    return new Reader(this.bootstrap, topic, 'committed', { group, readCommitted: true }).open()
  }

  /** In this library `timeout` is the timeout of requests and of transactions. */
  transactional(transactionalId, { timeout = BASE.timeout } = {}) {
    const producer = new Producer({
      ...this.options,
      timeout,
      idempotent: true,
      transactionalId,
      // By default the library continues as producer 0 with epoch 0, and is fenced if the transactional id has had
      // another producer.
      producerId: -1n,
      producerEpoch: -1,
      acks: -1
    })
    let transaction
    return {
      // If a transaction is open already, it continues.
      async begin() {
        if (!transaction || transaction.completed) transaction = await producer.beginTransaction()
      },
      async send(topic, records) {
        await transaction.send({ messages: records.map(record => ({ topic, ...record })) })
      },
      async sendOffsets(reader, group, found) {
        await transaction.addConsumer(reader.consumer)
        const last = new Map(found.map(({ partition, message }) => [partition, message]))
        for (const message of last.values()) await transaction.addOffset(message)
      },
      commit: () => transaction.commit(),
      abort: () => transaction.abort(),
      close: () => producer.close()
    }
  }

  isFenced(error) {
    return ['PRODUCER_FENCED', 'INVALID_PRODUCER_EPOCH'].some(id => error.findBy?.('apiId', id))
  }

  async stableEnd(name) {
    const partitions = [{ partitionIndex: 0, timestamp: -1n }]
    const isolationLevel = FetchIsolationLevels.READ_COMMITTED
    const [topic] = await this.admin.listOffsets({ topics: [{ name, partitions }], isolationLevel })
    return Number(topic.partitions[0].offset)
  }

  member(options, journal, failed) {
    return new Member(this.bootstrap, options, journal, failed)
  }

  async bounds(topic) {
    return [await this.offsetAt(topic, -2), await this.offsetAt(topic, -1)]
  }

  async offsetAt(name, timestamp) {
    const partitions = [{ partitionIndex: 0, timestamp: BigInt(timestamp) }]
    const [topic] = await this.admin.listOffsets({ topics: [{ name, partitions }] })
    return Number(topic.partitions[0].offset)
  }

  async deleteRecords(name, before) {
    const partitions = [{ partition: 0, offset: BigInt(before) }]
    await this.admin.deleteRecords({ topics: [{ name, partitions }] })
  }

  async createTopic(topic, partitions) {
    await this.admin.createTopics({ topics: [topic], partitions, replicas: 1 })
  }

  async createsTwice(topic, refused) {
    await refused(this.createTopic(topic, 1), 'topicalreadyexists')
  }

  async partitions(topic) {
    if (!(await this.admin.listTopics()).includes(topic)) return 0
    const metadata = await this.admin.metadata({ topics: [topic], forceUpdate: true })
    return metadata.topics.get(topic).partitionsCount
  }

  async addPartitions(name, count) {
    await this.admin.createPartitions({ topics: [{ name, count, assignments: null }] })
  }

  async deleteTopic(topic) {
    await this.admin.deleteTopics({ topics: [topic] })
  }

  async topicConfig(topic, name) {
    const resources = [{ resourceType: ConfigResourceTypes.TOPIC, resourceName: topic }]
    const [described] = await this.admin.describeConfigs({ resources })
    return described.configs.find(config => config.name === name)?.value
  }

  async setTopicConfig(topic, name, value) {
    const configOperation = kafka.IncrementalAlterConfigOperationTypes.SET
    const configs = [{ name, value, configOperation }]
    const resources = [{ resourceType: ConfigResourceTypes.TOPIC, resourceName: topic, configs }]
    await this.admin.incrementalAlterConfigs({ resources })
  }

  async groups() {
    return [...(await this.admin.listGroups()).keys()]
  }

  async describeGroup(group) {
    const { state, members } = (await this.admin.describeGroups({ groups: [group] })).get(group)
    return { state: spelled(state), members: members.size, clientIds: [...members.values()].map(one => one.clientId) }
  }

  async deleteGroup(group) {
    await this.admin.deleteGroups({ groups: [group] })
  }

  async committed(group, name, count) {
    const partitionIndexes = Array.from({ length: count }, (_, partition) => partition)
    const groups = [{ groupId: group, topics: [{ name, partitionIndexes }] }]
    const [answer] = await this.admin.listConsumerGroupOffsets({ groups })
    const offsets = new Map(
      answer.topics.flatMap(topic => topic.partitions.map(one => [one.partitionIndex, Number(one.committedOffset)]))
    )
    return partitionIndexes.map(partition => offsets.get(partition) ?? -1)
  }

  async commit(groupId, name, offsets) {
    const partitionOffsets = offsets.map((offset, partition) => ({ partition, offset: BigInt(offset) }))
    await this.admin.alterConsumerGroupOffsets({ groupId, topics: [{ name, partitionOffsets }] })
  }

  /** Joins as the only member, sends itself an assignment, leaves, and returns the received assignment. */
  async rawGroup(group, type, protocol, metadata, assignment) {
    const raw = await this.rawMember(group, type, protocol, metadata)
    try {
      const assignments = [{ memberId: raw.joined.memberId, assignment }]
      const synced = await promised(done =>
        kafka.syncGroupV5.api(
          raw.connection, group, raw.joined.generationId, raw.joined.memberId, null, type, protocol, assignments, done
        )
      )
      await promised(done => kafka.leaveGroupV5.api(raw.connection, group, [{ memberId: raw.joined.memberId }], done))
      return synced.assignment
    } finally {
      await raw.connection.close()
    }
  }

  async rawMember(group, type, protocol, metadata) {
    const connection = new Connection('compat')
    const [host, port] = this.bootstrap.split(':')
    await connection.connect(host, Number(port))
    const protocols = [{ name: protocol, metadata }]
    const join = memberId =>
      promised(done =>
        kafka.joinGroupV9.api(connection, group, SESSION_MS, 10_000, memberId, null, type, protocols, null, done)
      )
    try {
      return { connection, joined: await join('') }
    } catch (error) {
      const required = error.findBy?.('apiId', 'MEMBER_ID_REQUIRED')
      if (!required) throw error
      return { connection, joined: await join(required.memberId) }
    }
  }
}

/** Returns Kafka's spelling of a state that the library writes in capitals. */
const spelled = state => ({ STABLE: 'Stable', EMPTY: 'Empty', DEAD: 'Dead' })[state] ?? state

scenario('groups.partition-added', async run => {
  const topic = await run.topic(2)
  const group = run.group()
  const view = run.log({ topic, partitions: 2 })
  const first = run.start({ name: 'c1', group, topics: [topic] })
  await view.waitSettled(['c1'], allOf(topic, 2))
  await run.produce(topic, 2, 5)
  await view.waitCaughtUp()
  await run.client.addPartitions(topic, 4)
  // The library caches metadata for a while, and assigns from the cache when it leads the next rebalance. So wait until
  // it knows the new partitions.
  const seen = async () => (await first.consumer.metadata({ topics: [topic] })).topics.get(topic).partitionsCount
  await waitUntil(async () => (await seen()) === 4, 'it has looked again')
  const second = run.start({ name: 'c2', group, topics: [topic] })
  await view.waitSettled(['c1', 'c2'], allOf(topic, 4))
  await run.produce(topic, 4, 5)
  await view.waitCaughtUp()
  for (const member of [first, second]) await member.stop()
  run.detail = 'once a member joins: it does not look for new partitions itself'
})

scenario('groups.leave-versions', async run => {
  // A raw member leaves with each version that the library can send. The group must be empty immediately.
  for (const [version, api] of [[4, kafka.leaveGroupV4.api], [5, kafka.leaveGroupV5.api]]) {
    const group = run.group()
    const { connection, joined } = await run.client.rawMember(group, 'consumer', 'range', Buffer.alloc(0))
    await promised(done => api(connection, group, [{ memberId: joined.memberId }], done))
    await connection.close()
    const { members } = await run.client.describeGroup(group)
    assert(members === 0, `LeaveGroup v${version} left ${members} members`)
  }
  run.detail = 'versions 4, 5'
})

await main({
  suite: process.env.COMPAT_SUITE ?? 'platformatic',
  version: library.version,
  assignors: ['roundrobin'],
  codecs: {
    none: true,
    gzip: true,
    snappy: true,
    lz4: true,
    zstd: compressionsAlgorithms.zstd.available || `it takes zstd from Node.js, and ${process.version} has none`
  },
  headers: { repeated: true, nulls: true },
  // The library increments sequence numbers when a response arrives, so overlapping sends would carry the same numbers.
  overlapsIdempotence: false,
  skips: {
    'groups.commit-in-revoke': 'it has no revoke callback: it rejoins without waiting for who listens to the event',
    'groups.topic-deleted': 'its streams end for good once one of its topics is unknown',
    'groups.regex': 'it subscribes to names, not patterns'
  },
  client: bootstrap => new Client(bootstrap)
})
