package weir

import (
	"encoding/json"
	"fmt"
	"time"
)

// Position is a place in a topic. The zero value is its beginning.
type Position struct{ target any }

// Beginning is before the oldest message that is still stored.
func Beginning() Position { return Position{} }

// Head is after what is there now: at the settled head, so that every message that commits from now on comes after it.
func Head() Position { return Position{"head"} }

// AtID is before the message of that id, or before the next higher one there is. At least 1; at most the settled head + 1.
func AtID(id int64) Position { return Position{map[string]int64{"id": id}} }

// AtTime is before the first message that was produced at or after t.
func AtTime(t time.Time) Position {
	return Position{map[string]string{"time": t.UTC().Format(time.RFC3339Nano)}}
}

// MarshalJSON gives the form that weir.create_group and weir.seek take.
func (p Position) MarshalJSON() ([]byte, error) {
	if p.target == nil {
		return []byte(`"beginning"`), nil
	}
	return json.Marshal(p.target)
}

// String is for people.
func (p Position) String() string {
	b, err := p.MarshalJSON()
	if err != nil {
		return fmt.Sprint(p.target)
	}
	return string(b)
}
