package weirwatermill_test

import (
	"flag"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/ThreeDotsLabs/watermill/pubsub/tests"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/weirhq/weir"
	weirwatermill "github.com/weirhq/weir/adapter/watermill"
	"github.com/weirhq/weir/internal/pgtest"
)

var stress = flag.Bool("stress", false, "run the suite's stress test, too: it takes minutes")

// features are what Weir has in an ordered group, when messages have keys.
var features = tests.Features{
	ConsumerGroups:  true,
	GuaranteedOrder: true,
	Persistent:      true,
}

// payloadKey: the suite tells by the payload which messages are to keep their order.
func payloadKey(_ string, m *message.Message) string { return string(m.Payload) }

// pubSub gives a publisher and a subscriber that share nothing with others but the database.
func pubSub(t *testing.T, pool *pgxpool.Pool, group string, mode weir.Mode) (message.Publisher, message.Subscriber) {
	t.Helper()
	c := client(t, pool)
	publisher, err := weirwatermill.NewPublisher(c, &weirwatermill.PublisherConfig{MessageKey: payloadKey, AutoCreate: true})
	noError(t, err)
	subscriber, err := weirwatermill.NewSubscriber(c, group, &weirwatermill.SubscriberConfig{
		GroupOptions:    weir.GroupOptions{Mode: mode},
		ConsumerOptions: weir.ConsumerOptions{StopTimeout: time.Second, Prefetch: 100}, // the default of a queue group is slow with so many
		NackDelay:       5 * time.Millisecond,
	})
	noError(t, err)
	t.Cleanup(func() { _ = subscriber.Close() }) // the suite leaves some open
	return publisher, subscriber
}

func constructors(pool *pgxpool.Pool, mode weir.Mode) (tests.PubSubConstructor, tests.ConsumerGroupPubSubConstructor) {
	withGroup := func(t *testing.T, group string) (message.Publisher, message.Subscriber) {
		return pubSub(t, pool, group, mode)
	}
	return func(t *testing.T) (message.Publisher, message.Subscriber) { return withGroup(t, t.Name()) }, withGroup
}

// TestSuite is Watermill's own, as it is, for an ordered group.
func TestSuite(t *testing.T) {
	one, withGroup := constructors(database(t, server), weir.Ordered)
	tests.TestPubSub(t, features, one, withGroup)
}

// TestSuiteUnordered is the suite for the modes that promise no order.
func TestSuiteUnordered(t *testing.T) {
	for _, mode := range []weir.Mode{weir.Stream, weir.Queue} {
		t.Run(string(mode), func(t *testing.T) {
			one, withGroup := constructors(database(t, server), mode)
			unordered := features
			unordered.GuaranteedOrder = false
			tests.TestPubSub(t, unordered, one, withGroup)
		})
	}
}

// TestSuiteNewGroups: each subscriber is a group of its own, and gets what was published before it came.
func TestSuiteNewGroups(t *testing.T) {
	pool := database(t, server)
	old := features
	old.NewSubscriberReceivesOldMessages = true
	tests.TestNewSubscriberReceivesOldMessages(t, tests.TestContext{TestID: tests.NewTestID(), Features: old},
		func(t *testing.T) (message.Publisher, message.Subscriber) {
			return pubSub(t, pool, watermill.NewUUID(), weir.Ordered)
		})
}

// TestSuiteReconnect restarts the server twice while 10,000 messages are published and read.
func TestSuiteReconnect(t *testing.T) {
	if raceEnabled {
		t.Skip("the suite's test reads what it has published without waiting for who writes it: a race of its own")
	}
	s := pgtest.New(t, &pgtest.Options{Fast: true})
	one, _ := constructors(database(t, s), weir.Ordered)
	restarted := features
	restarted.RestartServiceCommand = restartCommand(t, s)
	tests.TestReconnect(t, tests.TestContext{TestID: tests.NewTestID(), Features: restarted}, one)
}

// TestStress runs the suite ten times at once, or STRESS_TEST_COUNT times.
func TestStress(t *testing.T) {
	if !*stress {
		t.Skip("it takes minutes: go test -run TestStress -stress -tags stress")
	}
	one, withGroup := constructors(database(t, server), weir.Ordered)
	tests.TestPubSubStressTest(t, features, one, withGroup)
}
