/** What the service answers. Made from its OpenAPI document by `scripts/client.py`. */

/** A trial. */
export interface ABTestOut {
  trial_id: string;
  kind: "interleaving" | "settings" | "shadow";
  /** The version that was active at the start of the trial. */
  version_a: string;
  /** The tested version. A trial of settings alone has the same version as `version_a`. */
  version_b: string;
  share: number;
  /** The settings of arm B in a trial of kind `settings`, otherwise null. */
  settings: Record<string, unknown> | null;
  /** The planned number of lists in a trial of kind `settings`, otherwise null. */
  planned_lists: number | null;
  status: "running" | "ended";
  created_at: string;
  ended_at: string | null;
  /** The report of the trial. A running trial has a preliminary report, only in `GET` of this trial. For interleaving, `series` is the difference over time. The field `planned` has the result of the first `planned_clicked` lists with a click. */
  report: Record<string, unknown> | null;
  /** The planned number of lists with a click. The value is null for shadow trials, and for trials of older versions of the service. */
  planned_clicked: number | null;
}

/** Trials, newest first. */
export interface ABTestPage {
  items: ABTestOut[];
  next_cursor: string | null;
}

/** An activation. */
export interface ActivationOut {
  /** A number that grows with every activation and every change of the pin. */
  generation: number;
  version: string | null;
  /** The version that was active before. After a change of the pin alone, both versions are the same. */
  previous: string | null;
  reason: "published" | "activated" | "rolled_back" | "returned";
  detail: Record<string, unknown> | null;
  at: string;
  /** The id of the key that requested the change. The value is `admin` for `NCR_ADMIN_KEY`, `local` without keys, `ncr` for the command, and null for the service. */
  by: string | null;
}

/** Activations, newest first. */
export interface ActivationPage {
  items: ActivationOut[];
  next_cursor: string | null;
}

/** The response of `POST /recommend`. */
export interface BasketRecommendation {
  /** The id to send with events that result from this list. The service counts clicks by this id. */
  recommendation_id: string;
  /** The user of the request, or null. */
  user: string | null;
  model_version: string | null;
  /** The list includes every event of this user up to this seq. */
  as_of_seq: number;
  took_ms: number;
  /** The items, best first. */
  items: RecommendedItem[];
  /** The value for `cursor` in the request for the next places. All other parameters except `n` must stay the same. The value is null at the end of the list, and after 1,000 places. The next page can be empty. */
  next_cursor: string | null;
  /** The ids in `items` and `item` that the service does not know. */
  ignored: string[];
}

/** The response of `POST /recommend/batch`. */
export interface BatchAnswer {
  /** The results in the order of the users. */
  results: (BatchList | BatchRefusal)[];
}

/** The list of a user in a batch. */
export interface BatchList {
  /** The id to send with events that result from this list. The service counts clicks by this id. */
  recommendation_id: string;
  user: string;
  model_version: string | null;
  /** The list includes every event of this user up to this seq. */
  as_of_seq: number;
  took_ms: number;
  /** The items, best first. */
  items: RecommendedItem[];
  /** The value for `cursor` in the request for the next places. All other parameters except `n` must stay the same. The value is null at the end of the list, and after 1,000 places. The next page can be empty. */
  next_cursor: string | null;
  status: 200;
}

/** The problem of a user in a batch who gets no list. */
export interface BatchRefusal {
  /** The status of the same request outside a batch. */
  status: number;
  code: string;
  detail: string;
}

/** An item of the user that explains a place in the list. */
export interface Because {
  id: string;
  title: string | null;
  /** The decrease of the mean log-odds if the user did not have this item. The log-odds compare the recommended item with each other item in the list. */
  effect: number;
}

/** The click-through of a version. */
export interface ClickThrough {
  /** The number of lists served. */
  lists: number;
  /** The number of lists with a positive event that names their `recommendation_id`. */
  clicked: number;
  /** The share of lists with a click, 0 to 1. The rate is null without lists. */
  rate: number | null;
}

/** The response of `POST /compare`. */
export interface Comparison {
  user: string;
  model_version: string;
  /** The list includes every event of this user up to this seq. */
  as_of_seq: number;
  /** With `popular`, the service knows nothing of the user. The probabilities are then those of the mean user. */
  source: "model" | "fold_in" | "popular";
  /** The items of the rows and the columns, without repetition. */
  items: string[];
  /** The probability that the user prefers the item of the row to the item of the column. */
  probability: number[][];
  /** The items, best first. */
  order: string[];
}

/** An event in a user's history. */
export interface EventOut {
  seq: number;
  event_id: string;
  user: string;
  item: string;
  type: string;
  value: number | null;
  timestamp: string;
}

/** A page of a user's history. */
export interface EventPage {
  items: EventOut[];
  next_cursor: string | null;
}

/** The result of each row of `POST /events`. */
export interface EventsAnswer {
  accepted: number;
  duplicates: number;
  rejected: RejectedRow[];
  last_seq: number;
}

/** An item. */
export interface ItemOut {
  id: string;
  title: string | null;
  categories: string[];
  hidden: boolean;
  attributes: Record<string, unknown>;
  available_from: string | null;
  available_until: string | null;
  embedding: number[] | null;
}

/** A page of the catalogue. */
export interface ItemPage {
  items: ItemOut[];
  next_cursor: string | null;
}

/** The result of each row of `POST /items`. */
export interface ItemsAnswer {
  accepted: number;
  rejected: RejectedItem[];
}

/** The response to a request for a job. */
export interface JobAccepted {
  job_id: string;
}

/** A job. */
export interface JobOut {
  job_id: string;
  kind: string;
  status: "queued" | "running" | "succeeded" | "failed" | "cancelled" | "rejected";
  params: Record<string, unknown>;
  progress: JobProgress | null;
  attempt: number;
  created_at: string;
  started_at: string | null;
  finished_at: string | null;
  model_version: string | null;
  metrics: Record<string, unknown> | null;
  error: string | null;
  /** The id of the key that requested the change. The value is `admin` for `NCR_ADMIN_KEY`, `local` without keys, `ncr` for the command, and null for the service. */
  by: string | null;
}

/** Jobs, newest first. */
export interface JobPage {
  items: JobOut[];
  next_cursor: string | null;
}

/** The progress of a running job. */
export interface JobProgress {
  phase: string;
  epoch: number;
  epochs: number;
  loss: number | null;
  /** NDCG@10 on the validation items. */
  ndcg: number | null;
  /** The estimated time left, in seconds. */
  eta_s: number | null;
  /** The peak memory of the child process, in bytes. */
  peak_bytes?: number | null;
}

/** The result of a merge. */
export interface MergeOut {
  id: string;
  into: string;
  events: number;
  preferences: number;
  /** A value for `min_seq`: a list of `into` with this seq includes the moved events and preferences. */
  last_seq: number;
}

/** A model version with its activations and click-through. */
export interface ModelDetail {
  version: string;
  active: boolean;
  /** True if the version is pinned. A pin keeps newer versions from becoming active. */
  pinned: boolean;
  /** `published`, `rejected` by the gate, or `deleted`. A deleted version has metrics but no files. */
  status: "published" | "rejected" | "deleted";
  model: string;
  factors: number;
  /** The training data has the events up to this seq. */
  trained_seq: number;
  users: number;
  items: number;
  interactions: number;
  metrics: Record<string, unknown>;
  params: Record<string, unknown>;
  job_id: string | null;
  created_at: string;
  activated_at: string | null;
  /** The activations of the version, newest first, at most 100. */
  activations: ActivationOut[];
  click_through: ClickThrough;
}

/** A model version. */
export interface ModelOut {
  version: string;
  active: boolean;
  /** True if the version is pinned. A pin keeps newer versions from becoming active. */
  pinned: boolean;
  /** `published`, `rejected` by the gate, or `deleted`. A deleted version has metrics but no files. */
  status: "published" | "rejected" | "deleted";
  model: string;
  factors: number;
  /** The training data has the events up to this seq. */
  trained_seq: number;
  users: number;
  items: number;
  interactions: number;
  metrics: Record<string, unknown>;
  params: Record<string, unknown>;
  job_id: string | null;
  created_at: string;
  activated_at: string | null;
}

/** Model versions, newest first. */
export interface ModelPage {
  items: ModelOut[];
  next_cursor: string | null;
}

/** The active version and its pin. */
export interface PinOut {
  version: string | null;
  /** The version that a rollback activates. */
  previous: string | null;
  pinned: boolean;
}

/** A popular item. */
export interface PopularItem {
  id: string;
  title: string | null;
  rank: number;
  /** The number of users with a positive event on the item. */
  users: number;
}

/** The response of `GET /popular`. */
export interface PopularItems {
  /** The window of the request, or null for all time. */
  window: string | null;
  /** The items, most users first. */
  items: PopularItem[];
  /** The value for `cursor` in the request for the next places. All other parameters except `n` must stay the same. The value is null at the end of the list, and after 1,000 places. The next page can be empty. */
  next_cursor: string | null;
}

/** The seq of a stored preference, in the order of all events and preferences. */
export interface PreferenceAnswer {
  seq: number;
}

/** The result of each row of a list of preferences. */
export interface PreferencesAnswer {
  accepted: number;
  rejected: RejectedRow[];
  last_seq: number;
}

/** A problem document by RFC 9457. The `code` is stable, and the `detail` is for people. */
export interface Problem {
  type: string;
  title: string;
  status: number;
  detail: string;
  code: string;
  request_id?: string;
}

/** A question about two items. A client sends the answer to `POST /preferences`. */
export interface Question {
  a: QuestionItem;
  b: QuestionItem;
  /** The information that the answer is expected to give about the taste of the user, in bits. Information from the questions before does not count. The value is null without a model. */
  information: number | null;
}

/** An item of a question. */
export interface QuestionItem {
  id: string;
  title: string | null;
}

/** Questions, the most informative first. */
export interface Questions {
  user: string;
  model_version: string | null;
  as_of_seq: number;
  source: "model" | "popular";
  items: Question[];
  /** The reason for an empty list of questions, otherwise null. */
  reason: "seen_everything" | "asked_everything" | "too_few_items" | null;
}

/** The response of `GET /recommend/{user}` and `POST /rerank`. */
export interface Recommendation {
  /** The id to send with events that result from this list. The service counts clicks by this id. */
  recommendation_id: string;
  user: string;
  model_version: string | null;
  /** The list includes every event of this user up to this seq. */
  as_of_seq: number;
  took_ms: number;
  /** The items, best first. */
  items: RecommendedItem[];
  /** The value for `cursor` in the request for the next places. All other parameters except `n` must stay the same. The value is null at the end of the list, and after 1,000 places. The next page can be empty. */
  next_cursor: string | null;
}

/** An item in the list. */
export interface RecommendedItem {
  /** Categories, only with `include=categories`. */
  categories?: string[];
  /** Attributes, only with `include=attributes`. */
  attributes?: Record<string, unknown>;
  id: string;
  title: string | null;
  /** The place in the list, from 1. */
  rank: number;
  /** The mean probability that the user prefers the item to the reference items of the model. Scores are comparable within a model version. The score is null for `popular`. */
  score: number | null;
  /** The data behind the place. `model`: the model knows the user and the item. `fold_in`: the model folds in events or attributes that it was not trained on, or all events of a user whose vector it does not store. `popular`: the service knows nothing of the user, or the model does not know the item. */
  source: "model" | "fold_in" | "popular";
  /** The probability that the user prefers the item to the item one rank below. The value is null where the probability is unknown, such as for the last item. */
  preferred_over_next: number | null;
  /** Up to three items of the user that explain the place, the most important item first. The field exists only with `explain=pairwise`. The list is empty for `popular`. */
  because?: Because[];
}

/** A rejected item, by its index in the list. */
export interface RejectedItem {
  index: number;
  code: string;
  detail: string;
}

/** A rejected row, by its index in the request. */
export interface RejectedRow {
  index: number;
  code: string;
  detail: string;
}

/** A rejected user, by its index in the list. */
export interface RejectedUser {
  index: number;
  code: string;
  detail: string;
}

/** A similar item. */
export interface SimilarItem {
  /** Categories, only with `include=categories`. */
  categories?: string[];
  /** Attributes, only with `include=attributes`. */
  attributes?: Record<string, unknown>;
  id: string;
  title: string | null;
  /** The similarity to the item of the request, at most 1. */
  score: number;
}

/** The response of `GET /items/{id}/similar`. */
export interface SimilarItems {
  /** The id to send with events that result from this list. The service counts clicks by this id. */
  recommendation_id: string;
  item: string;
  /** The version that computed `score`, the cosine similarity of the item vectors without popularity. The value is null if no model is active, or if the model does not know the item. The score is then the cosine similarity of the users of the items. */
  model_version: string | null;
  /** The items, most similar first. */
  items: SimilarItem[];
  /** The value for `cursor` in the request for the next places. All other parameters except `n` must stay the same. The value is null at the end of the list, and after 1,000 places. The next page can be empty. */
  next_cursor: string | null;
}

/** A signed token. */
export interface TokenOut {
  token: string;
  expires_at: string;
}

/** A trending item. */
export interface TrendingItem {
  id: string;
  title: string | null;
  rank: number;
  /** The number of users in the window. */
  users: number;
  /** The number of users in the window before. */
  users_before: number;
}

/** The response of `GET /trending`. */
export interface TrendingItems {
  window: string;
  /** The items, most significant rise first. */
  items: TrendingItem[];
  /** The value for `cursor` in the request for the next places. All other parameters except `n` must stay the same. The value is null at the end of the list, and after 1,000 places. The next page can be empty. */
  next_cursor: string | null;
}

/** A user. */
export interface UserOut {
  id: string;
  attributes: Record<string, unknown>;
  created_at: string;
}

/** A page of users. */
export interface UserPage {
  items: UserOut[];
  next_cursor: string | null;
}

/** The result of each row of `POST /users`. */
export interface UsersAnswer {
  accepted: number;
  rejected: RejectedUser[];
}
